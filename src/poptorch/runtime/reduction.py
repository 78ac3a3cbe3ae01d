"""Gradients of a process in few large tensors, and their sums over all processes.

Accumulators lie one behind the other in flat tensors, so that an exchange needs no copy and few messages. At the end of
the first one is a mark for each process: one that has failed takes part in the exchange with its mark set, and so all
learn of it at once, while the connection stays in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from poptorch.executable import Reduce, Shard
from poptorch.processes import Team

_APART = 64  # bytes: where an accumulator begins is a multiple of it
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and type


@dataclass(frozen=True)
class Flat:
    """Accumulators that share memory with the flat tensors that are exchanged."""

    tensors: dict[str, torch.Tensor]
    buckets: tuple[torch.Tensor, ...]
    marks: torch.Tensor  # a part of the first bucket, an entry for each process

    @classmethod
    def of(cls, layouts: Mapping[str, Layout], processes: int) -> Flat:
        """Accumulators of these layouts, all zero; a bucket for each type."""
        tensors: dict[str, torch.Tensor] = {}
        buckets: list[torch.Tensor] = []
        marks: torch.Tensor | None = None
        for dtype in dict.fromkeys(dtype for _, _, dtype in layouts.values()):
            own = {name: (shape, stride) for name, (shape, stride, kind) in layouts.items() if kind is dtype}
            step = max(1, _APART // dtype.itemsize)
            offsets: dict[str, int] = {}
            size = 0
            for name, (shape, _) in own.items():
                offsets[name] = size
                size += math.ceil(math.prod(shape) / step) * step
            extra = processes if marks is None else 0
            bucket = torch.zeros(size + extra, dtype=dtype)
            marks = bucket[size:] if marks is None else marks
            buckets.append(bucket)
            for name, (shape, stride) in own.items():
                tensors[name] = bucket.as_strided(shape, stride, offsets[name])
        if marks is None:  # what there is to reduce is not here
            marks = torch.zeros(processes)
            buckets.append(marks)
        return cls(tensors, tuple(buckets), marks)


class Reduction:
    """What a `Reduce` instruction does, on the accumulators of one binding."""

    def __init__(
        self,
        instruction: Reduce,
        flat: Flat,
        counters: list[torch.Tensor],
        micro_batches: int,
        scattered: Sequence[tuple[torch.Tensor, Shard]] = (),
    ) -> None:
        """`scattered` are accumulators whose rows are shared out; if they go in order, they are in `flat` as well."""
        self._flat, self._counters, self._micro_batches = flat, counters, micro_batches
        self.is_in_order, self._averages = instruction.in_order, instruction.averages
        self._scattered = scattered
        self._apart: list[list[torch.Tensor]] = []  # the gradients of each micro-batch so far, if they go in order

    @property
    def nbytes(self) -> int:
        """What every process has to add up with others in an update."""
        apart = [] if self.is_in_order else [tensor for tensor, _ in self._scattered]
        return sum(tensor.nbytes for tensor in (*self._flat.buckets, *apart))

    def clear(self) -> None:
        """Nothing of an update has been computed yet."""
        self._apart.clear()
        torch._foreach_zero_([*self._flat.buckets, *(tensor for tensor, _ in self._scattered), *self._counters])

    def set_aside(self) -> None:
        """Keep what one micro-batch has left in the accumulators, and clear them for the next."""
        self._apart.append([bucket.clone() for bucket in self._flat.buckets])
        torch._foreach_zero_([*self._flat.buckets, *self._counters])

    def reduce(self, group: Team, replicas: int) -> None:
        """Put the sums over all processes into the accumulators; raises if a process has failed."""
        self._exchange(group, replicas)
        failed = self._flat.marks.nonzero().flatten().tolist()
        if failed:
            raise group.raised_by(failed[0])
        for tensor, shard in self._scattered:
            if self.is_in_order:
                tensor[: shard.rows.start] = 0
                tensor[shard.rows.stop :] = 0
            else:
                group.add_up_rows(tensor, shard.bounds)
        group.go_on()

    def refuse(self, group: Team, replicas: int) -> None:
        """Take part in the exchange that the others wait for, and let them know that this process has failed."""
        self.clear()
        if self.is_in_order:
            for _ in range(self._micro_batches):
                self.set_aside()
        marked = self._apart[0][0][-group.count :] if self.is_in_order else self._flat.marks
        marked[group.index] = 1
        try:
            self._exchange(group, replicas)
        finally:
            self.clear()

    def _exchange(self, group: Team, replicas: int) -> None:
        if not self.is_in_order:
            group.add_up(self._flat.buckets)
            return
        for position, bucket in enumerate(self._flat.buckets):
            own = torch.stack([parts[position] for parts in self._apart])
            found = group.gather(own).view(group.count, -1, replicas, bucket.numel())
            self._combine(bucket, found.transpose(0, 1).reshape(-1, bucket.numel()))
        self._apart.clear()

    def _combine(self, total: torch.Tensor, gradients: torch.Tensor) -> None:
        """Add up gradients one by one, with the operations that a program uses for its own micro-batches."""
        for number, gradient in enumerate(gradients, start=1):
            if self._averages:
                gradient = (gradient - total) * torch.tensor(float(number)).reciprocal()
            total.add_(gradient)
