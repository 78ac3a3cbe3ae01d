"""`DataLoader`: PyTorch's loader, with batches as large as one call of a compiled model wants them."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import IterableDataset
from typing_extensions import Self

from poptorch._logging import logger
from poptorch.data.accessor import AsynchronousDataAccessor
from poptorch.data.checks import called, flag, iterated, keywords, member, whole_number
from poptorch.data.grouping import grouped
from poptorch.data.patience import Patience
from poptorch.data.plan import LoadPlan, plan_loading
from poptorch.data.share import Share, ShareSampler
from poptorch.data.torch_workers import SupervisedIterator
from poptorch.enums import DataLoaderMode
from poptorch.errors import DataError, Error, explain
from poptorch.options import Options, place_of_data


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A PyTorch loader whose batches feed whole calls: D × R × G micro-batches of `batch_size` rows each.

    >>> import poptorch
    >>> options = poptorch.Options().deviceIterations(4)
    >>> loader = poptorch.DataLoader(options, range(16), batch_size=2)
    >>> [batch.tolist() for batch in loader]
    [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]
    """

    _has_use_for_remainder = False  # whether smaller batches at the end are no mistake

    def __init__(
        self,
        options: Options,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Like `torch.utils.data.DataLoader`, to which `kwargs` go.

        Args:
            options: the options of the model that is fed. They are frozen; a `clone()` can still be changed.
            dataset: a data set of either style.
            batch_size: rows of one micro-batch; None passes the elements of the data set on as they are.
            shuffle: a new random order in each epoch.
            num_workers: processes that load.
            drop_last: leave out the rows that do not fill a whole call.
            persistent_workers: keep workers from one epoch to the next; the default if there are workers.
            auto_distributed_partitioning: give each process of a distributed run its own part of the data set.
            mode: `Sync`, or load ahead in another process with `Async` or `AsyncRebatched`.
            async_options: arguments for the `AsynchronousDataAccessor` of the asynchronous modes.
            rebatched_worker_size: rows that a worker loads at a time in mode `AsyncRebatched`.
            batch_sampler: gives lists of indices, each for one micro-batch.
            kwargs: also `timeout`, the seconds to wait for one batch. With 0, the default, the loader waits for as
                long as its workers are busy, and gives up after 7 seconds in which they do nothing.
        """
        self._accessor: AsynchronousDataAccessor | None = None
        if not isinstance(options, Options):
            raise DataError(f"the first argument of DataLoader is a poptorch.Options, not a {type(options).__name__}.")
        _check_samples(dataset, batch_sampler, **kwargs)
        mode = member("mode", mode, DataLoaderMode)
        num_workers = whole_number("num_workers", num_workers, least=0, what="it is a number of processes")
        drop_last, shuffle = flag("drop_last", drop_last), None if shuffle is None else flag("shuffle", shuffle)
        persists = num_workers > 0 if persistent_workers is None else flag("persistent_workers", persistent_workers)
        divides = flag("auto_distributed_partitioning", auto_distributed_partitioning)
        async_options = keywords("async_options", async_options, _ACCESSOR_ARGUMENTS)
        if "rebatched_size" in async_options:
            raise DataError("rebatched_size is set by the loader: use DataLoaderMode.AsyncRebatched instead.")
        self._patience = Patience.of(kwargs.pop("timeout", 0))
        self._plan = plan_loading(
            options,
            batch_size=batch_size,
            drop_last=drop_last,
            mode=mode,
            rebatched_worker_size=rebatched_worker_size,
            batch_sampler=batch_sampler,
        )
        options._freeze()
        self._options = options
        warns = not self._has_use_for_remainder
        if batch_sampler is not None:
            _check_batch_sampler(batch_sampler, self._plan, shuffle, warns=warns)
        elif shuffle is None:
            shuffle = False
        _, processes = place_of_data(options.Distributed)
        if divides and processes > 1:
            _check_can_be_shared(dataset, self._plan, batch_sampler, kwargs.get("sampler"))
            kwargs["sampler"] = _sampler_of_share(options, len(dataset), self._plan, shuffle=bool(shuffle))
            shuffle = False
        _warn_about_repeats(dataset, num_workers, kwargs)
        if warns:
            _warn_about_the_end(dataset, self._plan, processes)
        super().__init__(
            dataset,
            batch_size=self._plan.fetch_size,
            shuffle=shuffle,
            num_workers=num_workers,
            drop_last=self._plan.torch_drops_last,
            persistent_workers=persists,
            batch_sampler=batch_sampler,  # pyright: ignore[reportArgumentType]
            **kwargs,
        )
        if mode != DataLoaderMode.Sync:
            size = self._plan.rebatched_size
            self._accessor = AsynchronousDataAccessor(self, rebatched_size=size, **async_options)
            self._accessor._dataset = weakref.proxy(
                self
            )  # without a cycle, deleting the loader ends the worker at once

    @property
    def combinedBatchSize(self) -> int | None:
        """The rows that one call of the model takes; None if elements are not batched."""
        return self._plan.combined_batch_size

    @property
    def options(self) -> Options:
        """The options that were given."""
        return self._options

    @property
    def _drops_remainder(self) -> bool:
        """Whether rows at the end that do not fill a whole call are left out."""
        return self._plan.drop_last

    @property
    def _may_end_with_remainder(self) -> bool:
        """Whether the last item may have fewer rows than the others."""
        plan = self._plan
        return not plan.drop_last and plan.group_size == 0 and plan.combined_batch_size not in (None, 1)

    def __len__(self) -> int:
        """The number of items in an epoch."""
        size, joined = self._plan.rebatched_size, self._plan.group_size
        if size is None and joined <= 1:
            return super().__len__()
        if size is None:
            parts, size = super().__len__(), joined
        else:
            parts = len(self.dataset if isinstance(self.dataset, IterableDataset) else self.sampler)  # pyright: ignore
        return parts // size if self._plan.drop_last else -(-parts // size)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begin an epoch."""
        if self._accessor is not None:
            return iter(self._accessor)
        if isinstance(self._iterator, SupervisedIterator) and not self._iterator.is_usable:
            self._iterator = None
        batches = super().__iter__()
        if self._plan.group_size <= 1:
            return batches
        return grouped(batches, self._plan.group_size, drop_last=self._plan.drop_last)

    def _get_iterator(self) -> Any:
        """PyTorch's hook to make the iterator of an epoch."""
        if self.num_workers == 0:
            return super()._get_iterator()
        return SupervisedIterator(self, self._patience)

    def terminate(self) -> None:
        """Stop the asynchronous worker, if there is one. Happens by itself when the loader is deleted, and at exit."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.terminate()
        self._iterator = None  # and with it, workers that persist

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets: the loader without the processes that it has here."""
        return {**self.__dict__, "_accessor": None, "_iterator": None}


_ACCESSOR_ARGUMENTS = list(inspect.signature(AsynchronousDataAccessor).parameters)[1:]


def _check_samples(
    dataset: Any,
    batch_sampler: Any,
    *,
    sampler: Any = None,
    collate_fn: Any = None,
    worker_init_fn: Any = None,
    generator: Any = None,
    **others: Any,
) -> None:
    """Raise if samples cannot be had in the way that these arguments say."""
    if not isinstance(dataset, IterableDataset):
        if not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"dataset gives samples by index or is an IterableDataset, but {dataset!r} does and is not."
            )
        if not hasattr(dataset, "__len__") and sampler is None and batch_sampler is None:
            fix = "give it a __len__, pass a sampler, or let it be an IterableDataset"
            raise DataError(explain(f"{type(dataset).__name__} has no length, so there are no indices.", fix=fix))
    iterated("sampler", sampler)
    iterated("batch_sampler", batch_sampler)
    called("collate_fn", collate_fn)
    called("worker_init_fn", worker_init_fn)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise DataError(f"generator is a torch.Generator, not {generator!r}.")


def _check_batch_sampler(batch_sampler: Any, plan: LoadPlan, shuffle: bool | None, *, warns: bool) -> None:
    if shuffle:
        raise Error("batch_sampler decides the order, so shuffle=True cannot be given too.")
    if plan.drop_last or plan.group_size == 1 or not warns:
        return
    try:
        length = len(batch_sampler)
    except (TypeError, NotImplementedError):  # without __len__, or with one that gives NotImplemented or raises
        logger.warning(
            "the batch sampler has no length: the last item may consist of fewer than %d batches, because drop_last "
            "is False.",
            plan.group_size,
        )
        return
    if length % plan.group_size:
        logger.warning(
            "the batch sampler gives %d batches, which is not a multiple of the %d that a call takes: the last item is "
            "smaller, because drop_last is False.",
            length,
            plan.group_size,
        )


def _check_can_be_shared(dataset: Any, plan: LoadPlan, batch_sampler: Any, sampler: Any) -> None:
    """Raise unless the data set can be divided among processes."""
    fix = "divide the data yourself and pass auto_distributed_partitioning=False"
    if batch_sampler is not None or sampler is not None:
        given = "sampler" if batch_sampler is None else "batch_sampler"
        raise Error(explain(f"a {given} cannot be divided among processes automatically.", fix=fix))
    if isinstance(dataset, IterableDataset):
        raise DataError(explain("an IterableDataset cannot be divided among processes automatically.", fix=fix))
    if plan.combined_batch_size is None:
        raise DataError(explain("with batch_size=None data cannot be divided among processes automatically.", fix=fix))


def _sampler_of_share(options: Options, samples: int, plan: LoadPlan, *, shuffle: bool) -> ShareSampler:
    seed = getattr(options, "random_seed", None)
    if shuffle and seed is None:
        raise DataError(
            explain(
                "all processes must shuffle the data in the same way, so they need the same seed.",
                fix="set it with poptorch.Options.randomSeed",
            )
        )
    assert plan.combined_batch_size is not None
    process, processes = place_of_data(options.Distributed)
    share = Share(samples, processes, process, plan.combined_batch_size, plan.drop_last)
    return ShareSampler(share, seed if shuffle else None)


def _warn_about_repeats(dataset: Any, num_workers: int, torch_arguments: dict[str, Any]) -> None:
    """Warn if elements come more than once."""
    if isinstance(dataset, IterableDataset) and num_workers > 1 and torch_arguments.get("worker_init_fn") is None:
        logger.warning(
            "each of the %d workers iterates over the whole IterableDataset, so each element will be returned %d "
            "times. Pass a worker_init_fn that gives each worker its own part.",
            num_workers,
            num_workers,
        )


def _warn_about_the_end(dataset: Any, plan: LoadPlan, processes: int) -> None:
    """Warn if the last batch will be smaller than a compiled model takes."""
    if isinstance(dataset, IterableDataset) or plan.group_size or plan.drop_last or plan.combined_batch_size is None:
        return
    if len(dataset) % (plan.combined_batch_size * processes):
        logger.warning(
            "the data set has %d elements, which is not a multiple of the combined batch size %d times %d "
            "processes: the last batch is smaller, because drop_last is False, and a compiled model refuses it.",
            len(dataset),
            plan.combined_batch_size,
            processes,
        )
