"""Whatever memory the tensors of a data set have, the worker gets the data set; and if not, the reason comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import poptorch
from data_sets import Inc
from poptorch import AsynchronousDataAccessor, DataLoaderMode, SharingStrategy
from poptorch.data.process import why_it_did_not_start
from poptorch.data.sending import MOST_SHARED

TESTS = Path(__file__).parent.parent
FRESH = [SharingStrategy.ForkServer, SharingStrategy.SharedMemory, SharingStrategy.FileSystem]


class Rows(torch.utils.data.Dataset):
    """The rows of some tensors, one after the other."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return sum(map(len, self.tensors))

    def __getitem__(self, index):
        for tensor in self.tensors:
            if index < len(tensor):
                return tensor[index]
            index -= len(tensor)
        raise IndexError


class MadeForThePickle(Rows):
    """Its tensors are copied when it is pickled, and nobody else knows the copies."""

    def __getstate__(self):
        return {"tensors": [tensor.clone() for tensor in self.tensors]}


class Drawn(Inc):
    """Random numbers of a generator of its own."""

    def __init__(self):
        super().__init__(4)
        self.generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index):
        return torch.rand(2, generator=self.generator)


class Unwilling(Inc):
    """Can be sent, but not received."""

    def __setstate__(self, state):
        raise ValueError("a broken state")


class Unsendable(Inc):
    def __getstate__(self):
        raise RuntimeError("a secret state")


class SameMemory(Inc):
    """Whether a tensor and a view of it are still the same memory."""

    def __init__(self):
        super().__init__(2)
        self.base = torch.arange(4.0)
        self.view = self.base[2:]

    def __getitem__(self, index):
        self.base[2] += 1
        return self.view[:1].clone()


def load(dataset, strategy=SharingStrategy.ForkServer):
    with AsynchronousDataAccessor(dataset, sharing_strategy=strategy) as accessor:
        return [element.tolist() for element in accessor]


@pytest.mark.parametrize("strategy", FRESH)
def test_tensors_that_exist_only_for_the_pickle_arrive(strategy):
    assert load(MadeForThePickle(torch.arange(5.0)), strategy) == [0, 1, 2, 3, 4]


def test_generators_arrive():
    expected = Drawn()
    assert load(Drawn()) == [expected[index].tolist() for index in range(4)]


@pytest.mark.parametrize("generator", [None, 5])
def test_processes_that_shuffle_together_load_ahead(generator):
    def order(mode):
        options = poptorch.Options().randomSeed(1)
        more = {}
        if generator is None:
            options.Distributed.configureProcessId(1, 2)
        else:
            more["generator"] = torch.Generator().manual_seed(generator)
        with poptorch.DataLoader(options, torch.arange(20), batch_size=2, shuffle=True, mode=mode, **more) as loader:
            return [batch.tolist() for _ in range(2) for batch in loader]

    assert order(DataLoaderMode.Async) == order(DataLoaderMode.Sync)


def test_more_tensors_than_files_can_be_open():
    tensors = [torch.full((1,), index) for index in range(2000)]
    assert load(Rows(*tensors)) == list(range(2000))


@pytest.mark.parametrize("others", [0, MOST_SHARED])
def test_shared_tensors_stay_shared_among_any_number_of_others(others):
    tensor = torch.zeros(4).share_memory_()
    dataset = Rows(tensor, *[torch.zeros(1) for _ in range(others)])
    with AsynchronousDataAccessor(dataset) as accessor:
        tensor.fill_(7)  # only the first element may have been loaded
        assert [float(element) for element in accessor][1:4] == [7, 7, 7]


def test_views_are_views_of_the_same_memory():
    assert load(SameMemory()) == [[3.0], [4.0]]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["stays", "is gone", "is that of another file"])
def test_mapped_files_arrive_whatever_became_of_their_name(tmp_path, shared, name):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(8)))
    tensor = torch.from_file(str(path), shared=shared, size=8, dtype=torch.uint8)
    if name == "is gone":
        path.unlink()
    elif name != "stays":
        (tmp_path / "other").write_bytes(bytes(8))
        (tmp_path / "other").rename(path)
    assert load(Rows(tensor[2:6])) == [2, 3, 4, 5]


def test_a_mapped_file_is_mapped_by_the_worker_too(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(4))
    tensor = torch.from_file(str(path), shared=True, size=4, dtype=torch.uint8)
    with AsynchronousDataAccessor(Rows(tensor)) as accessor:
        tensor.fill_(7)  # only the first element may have been loaded
        assert [int(element) for element in accessor][1:] == [7, 7, 7]


@pytest.fixture
def no_shared_memory(monkeypatch):
    def full(storage):
        raise RuntimeError("unable to allocate shared memory: No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "share_memory_", full)


@pytest.mark.usefixtures("no_shared_memory")
def test_without_shared_memory_tensors_are_copied():
    assert load(Rows(torch.arange(3.0), torch.arange(3, 1000.0), torch.zeros(100_000)[:1])) == [*range(1000), 0]


@pytest.mark.usefixtures("no_shared_memory")
@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64, torch.bool, torch.int64])
def test_copies_have_any_type_and_shape(dtype):
    tensor = torch.arange(12).view(3, 4).t().to(dtype)
    empty = torch.empty(0, 3, dtype=dtype)
    assert load(Rows(tensor[:, 1:], empty)) == tensor[:, 1:].tolist()


@pytest.mark.parametrize("strategy", [SharingStrategy.ForkServer, SharingStrategy.FileSystem])
def test_the_reason_why_a_data_set_cannot_be_received_comes_back(strategy):
    with pytest.raises(poptorch.Error, match=r"(?s)worker thread failed to start.*ValueError: a broken state"):
        load(Unwilling(), strategy)


@pytest.mark.parametrize("strategy", FRESH)
def test_what_cannot_be_sent_says_so(strategy):
    class Local(Inc):
        pass

    with pytest.raises(AssertionError, match=r"(?s)cannot be sent.*Local.*SharingStrategy\.Fork"):
        load(Local(), strategy)
    with pytest.raises(AssertionError, match=r"cannot be sent.*RuntimeError: a secret state"):
        load(Unsendable(), strategy)


def test_a_system_that_starts_no_process_says_so(monkeypatch):
    def no_more():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_more)
    with pytest.raises(poptorch.Error, match=r"could not be started: BlockingIOError.*temporarily unavailable"):
        load(Inc(3), SharingStrategy.Fork)


def test_a_program_that_a_fresh_process_would_run_again_learns_about_the_guard(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("import torch, poptorch\npoptorch.AsynchronousDataAccessor(torch.arange(3))\n")
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, timeout=100)
    error = done.stderr.rpartition("Traceback")[2]
    assert done.returncode == 1
    assert "reason: it imported the program, which at once began to start a worker again" in error
    assert 'if __name__ == "__main__":' in error


def test_a_program_that_cannot_be_imported_is_pointed_at():
    details = why_it_did_not_start(1)
    assert "on standard error" in details["reason"]
    assert 'if __name__ == "__main__":' in details["likely"]
    assert why_it_did_not_start(-9) == {}


class OfDefaultType(Inc):
    def __getitem__(self, index):
        return torch.tensor([0.5])


def test_the_worker_makes_tensors_of_the_default_type():
    torch.set_default_dtype(torch.float64)
    try:
        with AsynchronousDataAccessor(OfDefaultType(2)) as accessor:
            assert [element.dtype for element in accessor] == [torch.float64] * 2
    finally:
        torch.set_default_dtype(torch.float32)
