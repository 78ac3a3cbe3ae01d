"""Loading data: samples per second against PyTorch's own loader, and how well loading hides behind computing.

Both loaders run in turns in one process, with the same data set, batch size and number of workers; each measures a
whole epoch with workers that are already running. Each batch is read by the consumer, as a model would.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data

import poptorch

WORKERS = 2


@dataclass(frozen=True)
class Throughput:
    """Samples per second of both loaders, and the median ratio of neighbouring epochs."""

    case: str
    samples_per_epoch: int
    torch_per_second: float
    async_per_second: float
    ratio: float
    goal: float


@dataclass(frozen=True)
class Overlap:
    """Milliseconds per step when loading a batch and computing on it each take `part_ms`."""

    case: str
    part_ms: float
    sync_ms: float
    async_ms: float
    goal_ms: float


class Tiny(torch.utils.data.Dataset):
    """Sixteen numbers."""

    def __len__(self) -> int:
        return 16_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), index, dtype=torch.float32)


class Images(torch.utils.data.Dataset):
    """150 kB and a label after a transform that keeps a core busy for 2 ms."""

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        end = time.thread_time() + 0.002
        image = torch.full((3, 112, 112), index, dtype=torch.float32)
        while time.thread_time() < end:
            pass
        return image, index


class Waiting(torch.utils.data.Dataset):
    """A sample that arrives after some time during which the machine is free for others."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((1000,), index, dtype=torch.float32)


CASES: dict[str, tuple[Any, int, float]] = {  # data set, batch size, goal for the ratio
    "tiny samples": (Tiny, 16, 1.0),
    "150 kB images, 2 ms transform": (Images, 16, 0.95),
}


def throughput(case: str, epochs: int) -> Throughput:
    kind, batch_size, goal = CASES[case]
    dataset = kind()
    plain = torch.utils.data.DataLoader(
        dataset, batch_size=batch_size, drop_last=True, num_workers=WORKERS, persistent_workers=True
    )
    with _async_loader(dataset, batch_size=batch_size, num_workers=WORKERS) as ours:
        times: list[tuple[float, float]] = []
        for _ in range(epochs + 1):  # the first starts the workers and does not count
            times.append((_epoch(plain), _epoch(ours)))
    torch_seconds, async_seconds = (statistics.median(column) for column in zip(*times[1:], strict=True))
    ratio = statistics.median(theirs / own for theirs, own in times[1:])
    n = len(dataset)
    return Throughput(case, n, n / torch_seconds, n / async_seconds, ratio, goal)


def _async_loader(dataset: Any, **arguments: Any) -> poptorch.DataLoader:
    # Epochs are loaded only when they begin: otherwise the first batches of each would be a gift.
    async_options = {"sharing_strategy": poptorch.SharingStrategy.Fork, "load_indefinitely": False}
    return poptorch.DataLoader(
        poptorch.Options(), dataset, mode=poptorch.DataLoaderMode.Async, async_options=async_options, **arguments
    )


def _epoch(loader: Iterable[Any]) -> float:
    begin = time.perf_counter()
    for batch in loader:
        tensor = batch if isinstance(batch, torch.Tensor) else batch[0]
        tensor.sum()
    return time.perf_counter() - begin


def overlap(part_ms: float = 10.0) -> Overlap:
    """Both parts sleep, so that the result does not depend on how many cores are free."""
    dataset = Waiting(part_ms / 1000)
    sync = _steps(poptorch.DataLoader(poptorch.Options(), dataset), part_ms)
    with _async_loader(dataset) as loader:
        ahead = _steps(loader, part_ms)
    return Overlap("load and compute", part_ms, sync, ahead, goal_ms=1.2 * part_ms)


def _steps(loader: Iterable[Any], part_ms: float) -> float:
    """Median milliseconds from one step to the next; the first has nothing to overlap with."""
    marks: list[float] = []
    for _ in loader:
        time.sleep(part_ms / 1000)
        marks.append(time.perf_counter())
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(marks[1:])) * 1000
