"""What some processes exchange: sums, rows, copies and messages from one to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import distributed


class Blame(Protocol):
    """Who knows what became of a process that is missing in an exchange."""

    def exchange(self) -> AbstractContextManager[None]:
        """Something that several processes take part in; if it fails, raise who is to blame."""
        ...

    def raised_by(self, rank: int) -> Exception:
        """The error to raise here if a process says that it has failed."""
        ...

    def tell(self, error: BaseException) -> None:
        """Let the others know what this process raises."""
        ...

    def go_on(self) -> None:
        """Processes have taken part in something again: what was raised before is over."""
        ...


class Team:
    """Some processes, or all, as one of them sees them; their ranks are counted within the team."""

    def __init__(self, ranks: Sequence[int], index: int, members: Any, blame: Blame) -> None:
        """`ranks` are those among all processes; `members` is torch's group of them, None for all."""
        self.ranks, self.index, self.members, self._blame = tuple(ranks), index, members, blame

    @property
    def count(self) -> int:
        return len(self.ranks)

    def raised_by(self, rank: int) -> Exception:
        """The error to raise here if a process of the team says that it has failed."""
        return self._blame.raised_by(self.ranks[rank])

    def tell(self, error: BaseException) -> None:
        """Let all processes know what this one raises."""
        self._blame.tell(error)

    def go_on(self) -> None:
        """All of the team have taken part in something again: what was raised before is over."""
        self._blame.go_on()

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all processes; all of them get the same bits."""
        with self._blame.exchange():
            for tensor in tensors:
                distributed.all_reduce(_as_real(tensor), group=self.members)

    def add_up_rows(self, tensor: torch.Tensor, bounds: Sequence[int]) -> None:
        """Replace the rows of this process by their sums over all processes, in the order of processes.

        `bounds` tells which rows are whose; those of others become zero.
        """
        flat, row = _in_rows(tensor), tensor.numel() // tensor.shape[0]
        sizes = [(end - begin) * row for begin, end in pairwise(bounds)]
        received = flat.new_empty((self.count, sizes[self.index]))
        with self._blame.exchange():
            distributed.all_to_all_single(
                received.view(-1), flat, [sizes[self.index]] * self.count, sizes, group=self.members
            )
        own = flat.narrow(0, bounds[self.index] * row, sizes[self.index])
        flat.zero_()
        for part in received:
            own.add_(part)
        _put_back(tensor, flat)

    def gather_rows(self, tensor: torch.Tensor, bounds: Sequence[int]) -> None:
        """Give every process the rows that the others have of a tensor."""
        flat, row = _in_rows(tensor), tensor.numel() // tensor.shape[0]
        parts = [flat[begin * row : end * row] for begin, end in pairwise(bounds)]
        with self._blame.exchange():
            works = [
                distributed.broadcast(part, group=self.members, group_src=rank, async_op=True)
                for rank, part in enumerate(parts)
            ]
            for work in works:
                work.wait()  # pyright: ignore[reportOptionalMemberAccess]
        _put_back(tensor, flat)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all processes, stacked in their order."""
        found = tensor.new_empty((self.count, *tensor.shape))
        with self._blame.exchange():
            distributed.all_gather(list(_as_real(found)), _as_real(tensor.contiguous()), group=self.members)
        return found

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Callable[[], object]:
        """Begin to send a contiguous tensor to a process; what this gives waits until it is on its way."""
        with self._blame.exchange():
            work = distributed.isend(_as_real(tensor), group=self.members, tag=tag, group_dst=to)
        assert work is not None, "all processes are members"

        def wait() -> None:
            with self._blame.exchange():
                work.wait()

        return wait

    def receive(self, tensor: torch.Tensor, sender: int, tag: int) -> None:
        """Wait for what a process sends with this tag, and put it into a contiguous tensor of the same size."""
        with self._blame.exchange():
            distributed.recv(_as_real(tensor), group=self.members, tag=tag, group_src=sender)

    def spread(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Give all processes the values that one of them has."""
        if not tensors:
            return
        sent = torch.cat([_bytes(tensor) for tensor in tensors])
        with self._blame.exchange():
            distributed.broadcast(sent, group=self.members, group_src=source)
        parts = sent.split([tensor.nbytes for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            if self.index != source:
                real = _as_real(tensor.detach())
                real.copy_(part.clone().view(real.dtype).view(real.shape))

    def number_of_first(self, number: int) -> int:
        """The number that the first process has."""
        box = torch.tensor([number], dtype=torch.int64)
        self.spread([box])
        return int(box)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """All elements as a vector, row by row: in the memory of the tensor if rows are whole there, otherwise a copy."""
    tensor = tensor.detach()
    row = tensor.numel() // tensor.shape[0]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    is_dense = extent == row and tensor.shape[0] * (tensor.stride(0) - row) == 0
    return tensor.as_strided((tensor.numel(),), (1,)) if is_dense else tensor.reshape(-1).clone()


def _put_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Let a tensor have the elements of its vector."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return _as_real(tensor.detach()).reshape(-1).contiguous().view(torch.uint8)
