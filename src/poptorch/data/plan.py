"""What a loader will do, worked out before it starts anything: who loads how many rows at a time.

Pure numbers; `plan_loading` is tested without data, workers or processes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from poptorch.data.checks import whole_number
from poptorch.enums import DataLoaderMode, OutputMode
from poptorch.errors import DataError, Error
from poptorch.options import BatchPlan, Options


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
    per_call = BatchPlan(
        options.device_iterations,
        options.Training.gradient_accumulation,
        options.replication_factor,
        OutputMode.All,
        1,
        options.input_group_size,
    ).input_batches
    if batch_sampler is not None:
        if not isinstance(batch_size, int) or batch_size != 1:
            raise Error(f"batch_sampler decides how large batches are, so batch_size={batch_size} cannot be given too.")
        return LoadPlan(getattr(batch_sampler, "batch_size", 1), per_call, 1, None, per_call, drop_last)
    if batch_size is None:
        return LoadPlan(None, per_call, None, None, 0, drop_last)
    batch_size = whole_number("batch_size", batch_size, least=1, what="a micro-batch has a number of rows")
    combined = fetch = batch_size * per_call
    if combined > sys.maxsize:
        raise DataError(f"batch_size is {batch_size}, so a call takes {combined} rows, more than any data set has.")
    if mode is DataLoaderMode.AsyncRebatched and rebatched_worker_size is not None:
        what = f"it is a number of rows, and not more than the combined batch size {combined}"
        fetch = whole_number("rebatched_worker_size", rebatched_worker_size, least=1, most=combined, what=what)
    # Only the accessor sees the rows of all workers, so only there a remainder can be told from a short fetch.
    rebatches = mode is DataLoaderMode.AsyncRebatched or (mode is DataLoaderMode.Async and not drop_last)
    return LoadPlan(batch_size, per_call, fetch, combined if rebatches and combined > 1 else None, 0, drop_last)
