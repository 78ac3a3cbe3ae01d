"""How long functions take, measured in turns in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def interleaved(functions: tuple[Callable[[], Any], ...], counts: tuple[int, ...], rounds: int = 9) -> list[float]:
    """What each function takes when nothing disturbs it, in microseconds: the median of the quietest round."""
    medians: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, count, found in zip(functions, counts, medians, strict=True):
            times: list[float] = []
            for _ in range(count):
                start = time.perf_counter()
                function()
                times.append(time.perf_counter() - start)
            found.append(statistics.median(times) * 1e6)
    return [min(found) for found in medians]
