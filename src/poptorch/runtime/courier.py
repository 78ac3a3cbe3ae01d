"""Carry values between the processes that share the IPUs of a replica.

Sends do not wait, and every process follows the same schedule, so that whoever waits is waiting for something that is
on its way. A process that has failed hands over zeros for what it has not computed, and says so at the meeting before
the update: nobody waits in vain, nobody keeps what was made of zeros, and the connection stays in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from poptorch.executable import Executable, Handover, Share
from poptorch.ir import with_stride
from poptorch.processes import Team

_TAGS = 2**30
Item = tuple[str, int]  # a value and its micro-batch, counted over the call


class Courier:
    """The side of one process in all exchanges of a session."""

    def __init__(self, executable: Executable, share: Share, group: Team, wanted: Collection[int]) -> None:
        """`wanted` are the micro-batches whose outputs all processes get."""
        self._share, self._group, self._wanted = share, group, wanted
        self._schedule = executable.schedule
        everything = (*share.handovers, *share.outputs)
        self._outgoing = {each.name: each for each in everything if each.giver == share.index}
        self._incoming = {each.name: each for each in everything if each.giver != share.index}
        self._outputs = {each.name for each in share.outputs}
        self._tags = 1 + max((each.number for each in everything), default=0)
        self._round = 0
        self._done: set[Item] = set()
        self._under_way: list[tuple[torch.Tensor, Callable[[], object]]] = []

    @property
    def incoming(self) -> Collection[str]:
        """The names of the values that other processes compute."""
        return self._incoming.keys()

    def send(self, named: Iterable[tuple[str, torch.Tensor]], index: int) -> None:
        """Hand over those values of a micro-batch that other processes need."""
        for name, value in named:
            handover = self._outgoing.get(name)
            if handover is not None and self._is_due(name, index):
                self._send(handover, index, value)

    def receive(self, name: str, index: int) -> torch.Tensor:
        """Wait for a value of a micro-batch that another process computes."""
        handover = self._incoming[name]
        found = torch.empty(handover.shape, dtype=handover.dtype)
        self._done.add((name, index))
        if found.numel():
            self._group.receive(found, handover.giver, self._tag(handover, index))
        return with_stride(found, handover.stride)

    def meet(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Wait for all, and give what all tell for the update; raises if one of them has failed."""
        self._end_sending()
        failed = self._marks(has_failed=False)
        self._round = (self._round + 1) % self._schedule.rounds
        if failed:
            self._round = 0
            raise self._group.raised_by(failed[0])
        return self._tell(values)

    def refuse(self) -> None:
        """Hand over zeros for all that the others wait for, and take what they send, until the next meeting."""
        count = self._schedule.micro_batches
        indices = range(self._round * count, (self._round + 1) * count)
        for handover in self._outgoing.values():
            for index in indices:
                if (handover.name, index) not in self._done and self._is_due(handover.name, index):
                    self._send(handover, index, torch.zeros(handover.shape, dtype=handover.dtype))
        for name in self._incoming:
            for index in indices:
                if (name, index) not in self._done and self._is_due(name, index):
                    self.receive(name, index)
        self._end_sending()

    def tell_failure(self) -> None:
        """Let the others know, at the meeting, that this process has failed."""
        self._marks(has_failed=True)
        self._round = 0

    def spread(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Give all processes what one of them has."""
        self._group.spread(tensors, source)

    def _is_due(self, name: str, index: int) -> bool:
        return name not in self._outputs or index in self._wanted

    def _send(self, handover: Handover, index: int, value: torch.Tensor) -> None:
        self._done.add((handover.name, index))
        value = value.detach().contiguous()
        for taker in handover.takers if value.numel() else ():
            self._under_way.append((value, self._group.send(value, taker, self._tag(handover, index))))

    def _tag(self, handover: Handover, index: int) -> int:
        return (index * self._tags + handover.number) % _TAGS

    def _end_sending(self) -> None:
        for _, wait in self._under_way:
            wait()
        self._under_way.clear()
        self._done.clear()

    def _marks(self, *, has_failed: bool) -> list[int]:
        """The processes that have failed, after all have said whether they have."""
        marks = self._group.gather(torch.tensor([int(has_failed)]))
        return marks.flatten().nonzero().flatten().tolist()

    def _tell(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        own = iter(values)
        for each in self._share.met:
            found[each.name] = next(own) if each.giver == self._share.index else _empty(each)
        for process in range(self._share.count):
            self._group.spread([found[each.name] for each in self._share.met if each.giver == process], process)
        return found


def _empty(handover: Handover) -> torch.Tensor:
    return torch.empty_strided(handover.shape, handover.stride, dtype=handover.dtype)
