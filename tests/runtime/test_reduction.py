"""Gradients in flat tensors, and their sums over processes; one process stands for all here."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from poptorch.executable import Reduce
from poptorch.runtime.reduction import Flat, Reduction

LAYOUTS = {
    "a": ((3, 2), (1, 3), torch.float32),
    "b": ((), (), torch.float64),
    "c": ((5,), (1,), torch.float32),
}


@dataclass
class Together:
    """Threads that exchange tensors as processes do."""

    count: int
    gathered: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.barrier = threading.Barrier(self.count, timeout=10)


@dataclass
class Member:
    """What a `Group` is to one of them."""

    together: Together
    index: int

    @property
    def count(self):
        return self.together.count

    def _all(self, value):
        self.together.barrier.wait()
        self.together.gathered[self.index] = value
        self.together.barrier.wait()
        found = [self.together.gathered[rank] for rank in range(self.count)]
        self.together.barrier.wait()
        return found

    def add_up(self, tensors):
        sums = [torch.stack(parts).sum(0) for parts in zip(*self._all([t.clone() for t in tensors]), strict=True)]
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(total)

    def gather(self, tensor):
        return torch.stack(self._all(tensor))

    def go_on(self):
        """Nothing failed."""

    def raised_by(self, rank):
        return RuntimeError(f"process {rank}")


def run_in_threads(count, work):
    together, results = Together(count), {}

    def run(rank):
        try:
            results[rank] = work(Member(together, rank))
        except RuntimeError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[rank] for rank in range(count)]


def test_accumulators_share_memory_with_the_buckets_and_with_nothing_else():
    flat = Flat.of(LAYOUTS, processes=3)
    for name, (shape, stride, dtype) in LAYOUTS.items():
        tensor = flat.tensors[name]
        assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (shape, stride, dtype)
        assert tensor.storage_offset() * dtype.itemsize % 64 == 0
        tensor.fill_(1)
    flat.marks.fill_(1)
    assert [bucket.dtype for bucket in flat.buckets] == [torch.float32, torch.float64]
    assert [int(bucket.sum()) for bucket in flat.buckets] == [6 + 5 + 3, 1]


@pytest.mark.parametrize("averages", [False, True])
def test_in_order_gradients_are_added_up_as_one_process_would(averages):
    """By accumulation step, then by process, then by replica; the values make every order give another sum."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(3, 2, 2, 5, generator=generator) * 10.0 ** torch.arange(12).view(3, 2, 2, 1)
    instruction = Reduce(("c",), 2, (0,), 0, in_order=True, averages=averages)

    def work(member):
        flat = Flat.of({"c": LAYOUTS["c"]}, processes=2)
        reduction = Reduction(instruction, flat, [], micro_batches=6)
        for gradient in gradients[:, member.index].reshape(6, 5):
            flat.tensors["c"].add_(gradient)
            reduction.set_aside()
        reduction.reduce(member, replicas=2)
        return flat.tensors["c"].clone()

    expected = torch.zeros(5)
    for number, gradient in enumerate(gradients.reshape(12, 5), start=1):
        expected += (gradient - expected) * torch.tensor(float(number)).reciprocal() if averages else gradient
    assert all(torch.equal(found, expected) for found in run_in_threads(2, work))


@pytest.mark.parametrize("in_order", [False, True])
def test_a_process_that_refuses_is_named_by_the_others_and_leaves_nothing_behind(in_order):
    def work(member):
        flat = Flat.of(LAYOUTS, processes=3)
        reduction = Reduction(Reduce(tuple(LAYOUTS), 3, (0,), 0, in_order), flat, [], micro_batches=1)
        flat.tensors["a"].fill_(1)
        if member.index == 1:
            reduction.refuse(member, replicas=1)
            return [float(bucket.abs().sum()) for bucket in flat.buckets]
        if in_order:
            reduction.set_aside()
        return reduction.reduce(member, replicas=1)

    assert run_in_threads(3, work) == ["process 1", [0.0, 0.0], "process 1"]
