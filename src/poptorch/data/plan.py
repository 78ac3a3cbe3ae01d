"""What a loader will do, worked out before it starts anything: who loads how many rows at a time.

Pure numbers; `plan_loading` is tested without data, workers or processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from poptorch.enums import DataLoaderMode
from poptorch.errors import DataError, Error
from poptorch.options import Options


@dataclass(frozen=True)
class LoadPlan:
    """How elements become the batches that one call of a model takes."""

    micro_batch_size: int | None  # None: the elements of the data set are passed on as they are
    micro_batches: int  # per call
    fetch_size: int | None  # rows that PyTorch's loader puts together
    rebatched_size: int | None  # rows that the accessor makes of them, if it is another number
    group_size: int  # batches of a batch sampler that are joined
    drop_last: bool

    @property
    def combined_batch_size(self) -> int | None:
        """Rows that one call takes."""
        return None if self.micro_batch_size is None else self.micro_batch_size * self.micro_batches

    @property
    def torch_drops_last(self) -> bool:
        """Whether PyTorch's loader is to drop an incomplete batch; otherwise it is not its business."""
        return self.drop_last and self.fetch_size is not None and self.rebatched_size is None and self.group_size == 0


def plan_loading(
    options: Options,
    *,
    batch_size: int | None,
    drop_last: bool,
    mode: DataLoaderMode,
    rebatched_worker_size: int | None,
    batch_sampler: Any,
) -> LoadPlan:
    """The plan for these arguments of a loader; raises if they contradict each other."""
    per_call = (
        options.device_iterations
        * (options.replication_factor // options.input_group_size)
        * options.Training.gradient_accumulation
    )
    if batch_sampler is not None:
        if batch_size != 1:
            raise Error(f"batch_sampler decides how large batches are, so batch_size={batch_size} cannot be given too.")
        return LoadPlan(getattr(batch_sampler, "batch_size", 1), per_call, 1, None, per_call, drop_last)
    if batch_size is None:
        return LoadPlan(None, per_call, None, None, 0, drop_last)
    if not isinstance(batch_size, Integral) or batch_size < 1:
        raise DataError(f"batch_size is {batch_size!r}, but a micro-batch has a number of rows, at least one.")
    combined = fetch = batch_size * per_call
    if mode is DataLoaderMode.AsyncRebatched and rebatched_worker_size is not None:
        if not 1 <= rebatched_worker_size <= combined:
            raise DataError(
                f"rebatched_worker_size is {rebatched_worker_size}, "
                f"but it must lie between 1 and the combined batch size {combined}."
            )
        fetch = rebatched_worker_size
    # Only the accessor sees the rows of all workers, so only there a remainder can be told from a short fetch.
    rebatches = mode is DataLoaderMode.AsyncRebatched or (mode is DataLoaderMode.Async and not drop_last)
    return LoadPlan(batch_size, per_call, fetch, combined if rebatches and combined > 1 else None, 0, drop_last)
