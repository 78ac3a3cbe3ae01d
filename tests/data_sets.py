"""Data sets that tests share; worker processes import this file, so it is kept light."""

from __future__ import annotations

import functools
import math
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import poptorch


class Inc(Dataset):
    """Element i is a tensor filled with i."""

    def __init__(self, n=100, shape=(2, 3), dtype=torch.float32):
        self.n, self.shape, self.dtype = n, shape, dtype

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.full(self.shape, index, dtype=self.dtype)


class IncIter(IterableDataset):
    """The same by iteration, without a length."""

    def __init__(self, n=100, shape=(2, 3), dtype=torch.float32):
        self.n, self.shape, self.dtype, self.range = n, shape, dtype, range(n)

    def __iter__(self):
        return (torch.full(self.shape, index, dtype=self.dtype) for index in self.range)


class IncIterLen(IncIter):
    """The same with a length."""

    def __len__(self):
        return self.n


def split_init(worker_id):
    """Give each worker its own slice of the data."""
    info = get_worker_info()
    per = math.ceil(info.dataset.n / info.num_workers)
    info.dataset.range = range(worker_id * per, min(info.dataset.n, (worker_id + 1) * per))


class Pairs(Inc):
    """Data and a label."""

    def __getitem__(self, index):
        return super().__getitem__(index), torch.tensor([index])


class Dicts(Inc):
    """Data and a label in a dictionary."""

    def __getitem__(self, index):
        return {"data": super().__getitem__(index), "label": torch.tensor([index])}


class Failing(Inc):
    """One element does what `fault` names.

    Whoever loads elements can be made to note its process id in a file, and the time of the fault in another.
    """

    def __init__(self, fault, n=100, at=5, notes=None, shape=(2, 3)):
        super().__init__(n, shape)
        self.fault, self.at, self.notes = fault, at, notes

    def __getitem__(self, index):
        if self.notes is not None:
            with Path(self.notes).open("a") as file:
                file.write(f"{os.getpid()}\n")
        if index == self.at:
            if self.notes is not None:
                Path(f"{self.notes}.time").write_text(str(time.monotonic()))
            FAULTS[self.fault]()
        return super().__getitem__(index)


def _raise():
    raise ValueError("a broken sample")


def _kill(number):
    os.kill(os.getpid(), number)
    time.sleep(60)  # the signal may need a moment


def _sleep():
    time.sleep(100_000)


FAULTS = {
    "exception": _raise,
    "exit": lambda: os._exit(3),
    "kill": lambda: _kill(signal.SIGKILL),
    "segfault": lambda: _kill(signal.SIGSEGV),
    "sleep": _sleep,
}


class Slow(Inc):
    """Each element takes some time, spent sleeping or computing."""

    def __init__(self, n, seconds, computes=False):
        super().__init__(n)
        self.seconds, self.computes = seconds, computes

    def __getitem__(self, index):
        end = time.monotonic() + self.seconds
        while self.computes and time.monotonic() < end:
            pass
        time.sleep(max(0.0, end - time.monotonic()))
        return super().__getitem__(index)


class Counting(Inc):
    """Appends a byte to a file for each element that is loaded."""

    def __init__(self, n, path):
        super().__init__(n)
        self.path = Path(path)

    def __getitem__(self, index):
        with self.path.open("ab") as file:
            file.write(b".")
        return super().__getitem__(index)


class Records:
    """A batch type of its own."""

    def __init__(self, data, label):
        self.data, self.label = data, label


class RecordsParser(poptorch.ICustomArgParser):
    """Takes such a batch apart."""

    def yieldTensors(self, struct):
        yield struct.data
        yield struct.label

    def reconstruct(self, original_structure, tensor_iterator):
        return Records(next(tensor_iterator), next(tensor_iterator))


def pad_to(rows):
    """A collate function that fills every batch up to `rows` rows with -1."""
    return functools.partial(_pad, rows, False)


def pad_records_to(rows):
    """The same with batches of type `Records`."""
    return functools.partial(_pad, rows, True)


def _pad(rows, as_records, samples):
    data = torch.full((rows, *samples[0].shape), -1.0)
    data[: len(samples)] = torch.stack(samples)
    label = torch.arange(rows)
    return Records(data, label) if as_records else (data, label)


class GrowingBatches:
    """A batch sampler that gives 1, 2, …, `largest`, 1, 2, … indices."""

    def __init__(self, n, largest):
        self.n, self.largest = n, largest

    def __iter__(self):
        first, size = 0, 1
        while first < self.n:
            yield list(range(first, min(first + size, self.n)))
            first, size = first + size, size % self.largest + 1

    def __len__(self):
        return sum(1 for _ in self)


class RandomBatches:
    """A batch sampler without a length."""

    def __init__(self, n, largest):
        self.n, self.largest = n, largest

    def __iter__(self):
        generator, first = torch.Generator().manual_seed(0), 0
        while first < self.n:
            size = int(torch.randint(1, self.largest + 1, (), generator=generator))
            yield list(range(first, min(first + size, self.n)))
            first += size
