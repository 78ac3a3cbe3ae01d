"""Which samples of a data set belong to which process of a distributed run.

Pure numbers first (`Share`), then the sampler that walks over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from poptorch.errors import DataError, explain


@dataclass(frozen=True)
class Share:
    """The part of `samples` samples that process `process` of `processes` loads: a contiguous range of positions."""

    samples: int
    processes: int
    process: int
    combined_batch_size: int
    drop_last: bool

    def __post_init__(self) -> None:
        if not 0 <= self.process < self.processes:
            raise DataError(f"there is no process {self.process} of {self.processes}: they are counted from 0.")
        if self.drop_last and self.samples < self.combined_batch_size * self.processes:
            raise DataError(
                explain(
                    f"the data set has {self.samples} samples, but {self.processes} processes need "
                    f"one combined batch of {self.combined_batch_size} each.",
                    fix="use fewer processes or smaller batches, or drop_last=False",
                )
            )

    @property
    def length(self) -> int:
        """How many samples this process loads in an epoch."""
        if self.drop_last:  # the same number of whole batches for everybody
            return self.combined_batch_size * (self.samples // (self.combined_batch_size * self.processes))
        return self.samples // self.processes + (self.process < self.samples % self.processes)

    @property
    def begin(self) -> int:
        """The first position of this process."""
        if self.drop_last:
            return self.process * self.length
        return self.process * (self.samples // self.processes) + min(self.process, self.samples % self.processes)

    @property
    def left_over(self) -> int:
        """How many samples nobody loads in an epoch."""
        return self.samples - self.processes * self.length if self.drop_last else 0

    def positions(self, epoch: int) -> range:
        """The positions of an epoch: from the first on, every other epoch leaves out the other end of the data."""
        begin = self.begin + (self.left_over if epoch % 2 == 0 else 0)
        return range(begin, begin + self.length)


class ShareSampler(Sampler[int]):
    """The indices of a share, in order or, with a seed, in a new random order in each epoch.

    Every process draws the same permutation of all samples and takes its own range of it, so the shares never overlap.
    """

    def __init__(self, share: Share, seed: int | None) -> None:
        self._share = share
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self._generator is None:
            return iter(range(self._share.begin, self._share.begin + self._share.length))
        order = torch.randperm(self._share.samples, generator=self._generator)
        mine = self._share.positions(self._epoch)
        self._epoch += 1
        return iter(order[mine.start : mine.stop].tolist())

    def __len__(self) -> int:
        return self._share.length
