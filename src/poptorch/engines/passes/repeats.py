"""Where a sequence repeats itself: stretches in which every item is the same as the one a period before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_CONTEXT = 8  # items in a row that are looked for, so that an item which occurs often in a period counts once
_CANDIDATES = 24  # periods that are tried
_NEARLY_ALL = 0.9  # of what the longest stretch covers: a shorter period that covers so much is better


@dataclass(frozen=True)
class Repeat:
    """A stretch of a sequence, from `start` up to `end`, in which items come again after `period`."""

    start: int
    end: int
    period: int

    @property
    def length(self) -> int:
        return self.end - self.start


def find_repeats(items: Sequence[Hashable], fewest: int) -> list[Repeat]:
    """Stretches of at least `fewest` periods, none of which overlap, in order; the longest are found first."""
    found: list[Repeat] = []
    open_stretches = [(0, len(items))]
    while open_stretches:
        start, end = open_stretches.pop()
        best = _longest(items, start, end, fewest)
        if best is not None:
            found.append(best)
            open_stretches += [(start, best.start), (best.end, end)]
    return sorted(found, key=lambda repeat: repeat.start)


def _longest(items: Sequence[Hashable], start: int, end: int, fewest: int) -> Repeat | None:
    """The repeat that covers most, with the shortest period among those that cover about as much."""
    repeats = [
        repeat for period in _periods(items, start, end) for repeat in _stretches(items, start, end, period, fewest)
    ]
    if not repeats:
        return None
    most = max(repeat.length for repeat in repeats)
    large = [repeat for repeat in repeats if repeat.length >= _NEARLY_ALL * most]
    return min(large, key=lambda repeat: (repeat.period, -repeat.length, repeat.start))


def _periods(items: Sequence[Hashable], start: int, end: int) -> list[int]:
    """How far apart the same items stand, alone or with those that follow: the most frequent distances."""
    gaps: Counter[int] = Counter()
    for width in (1, _CONTEXT):
        last: dict[Hashable, int] = {}
        for index in range(start, end - width + 1):
            key = items[index] if width == 1 else tuple(items[index : index + width])
            if key in last:
                gaps[index - last[key]] += 1
            last[key] = index
    return [gap for gap, _ in gaps.most_common(_CANDIDATES)]


def _stretches(items: Sequence[Hashable], start: int, end: int, period: int, fewest: int) -> list[Repeat]:
    """The longest stretches with this period that have enough of them."""
    found: list[Repeat] = []
    first = start
    for index in range(start, end - period + 1):
        if index < end - period and items[index] == items[index + period]:
            continue
        if index - first >= period * (fewest - 1):
            found.append(Repeat(first, index + period, period))
        first = index + 1
    return found
