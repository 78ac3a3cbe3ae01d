"""When the micro-batches of a call started and ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

Latency = tuple[float, float, float]
NO_LATENCY: Latency = (0.0, 0.0, 0.0)


@dataclass
class CallTimes:
    """Moments of one call in seconds, from an arbitrary origin; `started` and `finished` have one per micro-batch."""

    begun: float = 0.0
    started: list[float] = field(default_factory=list[float])
    finished: list[float] = field(default_factory=list[float])
    collected: float = 0.0

    @classmethod
    def begin(cls) -> CallTimes:
        return cls(perf_counter())

    @property
    def requested(self) -> list[float]:
        """When the inputs of each micro-batch were wanted: as soon as the one before was done."""
        return [self.begun, *self.finished[:-1]][: len(self.started)]

    @property
    def seconds(self) -> float:
        """How long the whole call took."""
        return self.collected - self.begun


def latency(starts: Sequence[float], ends: Sequence[float]) -> Latency:
    """Minimum, maximum and average time between matching moments; each end belongs to the starts since the last."""
    if not starts or not ends:
        return NO_LATENCY
    group = max(1, len(starts) // len(ends))
    spans = [end - min(starts[i * group : (i + 1) * group]) for i, end in enumerate(ends[: len(starts) // group])]
    return min(spans), max(spans), sum(spans) / len(spans)
