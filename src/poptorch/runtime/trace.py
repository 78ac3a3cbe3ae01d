"""What a call did and when, as a frozen value; counters and latencies are read from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from poptorch.executable import Instruction, Run, Schedule

Latency = tuple[float, float, float]
NO_LATENCY: Latency = (0.0, 0.0, 0.0)


class Span(NamedTuple):
    """One instruction while it ran: which micro-batch of the call it worked on, and from when to when in seconds.

    What works on several at once has a span for each.
    """

    instruction: Instruction
    replica: int | None
    micro_batch: int | None
    begin: float
    end: float


class RunTrace(NamedTuple):
    """One call: when it began, when each of its instructions did, and when the outputs were handed over.

    Moments are seconds from an arbitrary origin.
    """

    schedule: Schedule
    begun: float
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    collected: float

    @property
    def spans(self) -> Iterator[Span]:
        """What ran, in order."""
        instructions = self.schedule.instructions
        for position, (begin, end) in enumerate(zip(self.begins, self.ends, strict=True)):
            turn, index = divmod(position, len(instructions))
            instruction = instructions[index]
            if isinstance(instruction, Run):
                first = turn * self.schedule.micro_batches + instruction.micro_batch
                for place in range(instruction.width):
                    replica = instruction.replica + place % instruction.replicas
                    yield Span(instruction, replica, first + place, begin, end)
            else:
                yield Span(instruction, None, None, begin, end)

    @property
    def started(self) -> list[float]:
        """When each micro-batch had its inputs, and its first program began."""
        found: dict[int, float] = {}
        for span in self.spans:
            if span.micro_batch is not None:
                found.setdefault(span.micro_batch, span.begin)
        return [found[index] for index in sorted(found)]

    @property
    def finished(self) -> list[float]:
        """When the last program of each micro-batch was done."""
        found = {span.micro_batch: span.end for span in self.spans if span.micro_batch is not None}
        return [found[index] for index in sorted(found)]

    @property
    def requested(self) -> list[float]:
        """When the inputs of each micro-batch were wanted: as soon as the one before was done."""
        return [self.begun, *self.finished[:-1]]

    @property
    def seconds(self) -> float:
        """How long the whole call took."""
        return self.collected - self.begun


def latency(starts: Sequence[float], ends: Sequence[float]) -> Latency:
    """Minimum, maximum and average time from starts to ends.

    If there are fewer ends than starts, each end waits for several starts in a row, and counts from the earliest.
    """
    if not starts or not ends:
        return NO_LATENCY
    group = max(1, len(starts) // len(ends))
    spans = [end - min(starts[i * group : (i + 1) * group]) for i, end in enumerate(ends[: len(starts) // group])]
    return min(spans), max(spans), sum(spans) / len(spans)
