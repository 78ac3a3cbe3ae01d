"""Loaders of PyTorch as loaders of poptorch, whose batches feed whole calls."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

import poptorch
from poptorch.errors import explain
from poptorch.lightning import nested
from poptorch.lightning.packages import Lightning
from poptorch.lightning.results import Batching

_CARRIED = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "persistent_workers",
)


class HostLoader(poptorch.DataLoader):
    """A converted loader."""

    _has_use_for_remainder = True

    @property
    def counts_rows(self) -> bool:
        """Whether all batches but the last have the same number of rows."""
        has_rows = self.combinedBatchSize is not None and not isinstance(self.dataset, IterableDataset)
        return has_rows and type(self.batch_sampler) is BatchSampler


def converted(
    package: Lightning,
    loader: Any,
    options: poptorch.Options,
    *,
    training: bool,
    keeps_remainder: bool,
    tracks_indices: bool,
) -> Any:
    """The loader for a stage: PyTorch's loaders become ours, everything else stays what it is."""
    if isinstance(loader, poptorch.DataLoader) or not isinstance(loader, DataLoader):
        return loader
    _check_is_plain(package, loader)
    drop_last = training or loader.drop_last or not keeps_remainder
    arguments: dict[str, Any] = {name: getattr(loader, name) for name in _CARRIED}
    if hasattr(loader, "in_order"):
        arguments["in_order"] = loader.in_order
    if loader.num_workers > 0:
        arguments["prefetch_factor"] = loader.prefetch_factor
    arguments.update(_sampling(package, loader, options))
    own = HostLoader(options, loader.dataset, drop_last=drop_last, **arguments)
    _check_size(package, own, Batching.of(options, training=True), training=training)
    if tracks_indices and own.counts_rows:
        vars(own)["batch_sampler"] = package.IndexTracker(own.batch_sampler)
    return own


def _check_is_plain(package: Lightning, loader: DataLoader[Any]) -> None:
    changed = [name for name in ("__iter__", "__len__") if getattr(type(loader), name) is not getattr(DataLoader, name)]
    if changed:
        raise package.MisconfigurationException(
            explain(
                f"{type(loader).__name__} has its own {' and '.join(changed)}, so its batches cannot be put together "
                "for calls of an IPU.",
                fix="use a poptorch.DataLoader, with the options of the strategy",
            )
        )


def _sampling(package: Lightning, loader: DataLoader[Any], options: poptorch.Options) -> dict[str, Any]:
    """The arguments that decide which rows come when."""
    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": loader.batch_size}
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return {"batch_sampler": loader.batch_sampler}
    if options.Distributed.numProcesses == 1:
        return {"batch_size": loader.batch_size, "sampler": loader.sampler}
    if not isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
        kind, count = type(loader.sampler).__name__, options.Distributed.numProcesses
        raise package.MisconfigurationException(
            explain(
                f"a {kind} cannot be divided among {count} processes.",
                fix="pass a poptorch.DataLoader with auto_distributed_partitioning=False, and divide the rows yourself",
            )
        )
    return {"batch_size": loader.batch_size, "shuffle": isinstance(loader.sampler, RandomSampler)}


def _check_size(package: Lightning, loader: HostLoader, batching: Batching, *, training: bool) -> None:
    """Say which rows a training loader leaves out, and refuse one that would leave out all."""
    size = loader.combinedBatchSize
    if not training or size is None or not loader.counts_rows:
        return
    try:
        rows = len(loader.sampler)  # pyright: ignore[reportArgumentType]
    except TypeError:  # samplers need not know how many rows they give
        return
    parts = (
        f"{size // batching.micro_batches} (batch_size) × {batching.device_iterations} (device iterations) × "
        f"{batching.gradient_accumulation} (gradient accumulation) × {batching.replicas} (replicas)"
    )
    if rows < size:
        raise package.MisconfigurationException(
            f"the training data has {rows} rows, but one step of the IPUs takes {size}: {parts}."
        )
    if rows % size:
        package.warn(
            f"the training data has {rows} rows, and one step of the IPUs takes {size}: {parts}. The last "
            f"{rows % size} rows of each epoch are skipped."
        )


def short_shapes(combined: Any, batch: Any, dataloader_idx: int) -> tuple[torch.Size, ...] | None:
    """The shapes of a batch with fewer rows than a call takes, from the loaders of a loop; None if it is whole."""
    loaders = combined.flattened
    if combined._mode == "sequential":
        pairs = [(loaders[dataloader_idx], batch)]
    else:
        parts = nested.parts(batch)
        pairs = list(zip(loaders, parts, strict=True)) if len(parts) == len(loaders) else [(loaders[0], batch)]
    if not any(_is_short(loader, part) for loader, part in pairs):
        return None
    return tuple(leaf.shape for _, leaf in nested.leaves(batch, "") if isinstance(leaf, torch.Tensor))


def _is_short(loader: Any, batch: Any) -> bool:
    if not isinstance(loader, poptorch.DataLoader) or loader.combinedBatchSize is None:
        return False
    sizes = (len(leaf) for _, leaf in nested.leaves(batch, "") if isinstance(leaf, torch.Tensor) and leaf.dim())
    return next(sizes, loader.combinedBatchSize) < loader.combinedBatchSize
