"""What a call costs that brings several micro-batches for an update: one after the other, and side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import poptorch
from benchmarks.workloads import WORKLOADS


def side_by_side(workload: str, rows: int, accumulation: int, replicas: int, seconds: float) -> dict[str, Any]:
    """Microseconds per call: runs apart, together, and one micro-batch with all rows. They take turns."""
    calls = {
        "apart_us": _call(workload, rows, accumulation, replicas, together=False),
        "together_us": _call(workload, rows, accumulation, replicas, together=True),
        "plain_us": _call(workload, rows * accumulation * replicas, 1, 1, together=False),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(9):
        for name, call in calls.items():
            times[name].append(_measure(call, seconds))
    return {name: 1e6 * statistics.median(found) for name, found in times.items()}


def _call(workload: str, rows: int, accumulation: int, replicas: int, *, together: bool) -> Callable[[], Any]:
    chosen = WORKLOADS[workload]
    options = poptorch.Options().engine("inductor").replicationFactor(replicas).runSideBySide(together)
    options.Training.gradientAccumulation(accumulation)
    model = chosen.training_model()
    training = poptorch.trainingModel(model, options, chosen.optimizer(model))
    (batch,) = chosen.batches(1, size=rows * accumulation * replicas)
    for _ in range(3):
        training(*batch)
    return lambda: training(*batch)


def _measure(call: Callable[[], Any], seconds: float) -> float:
    """Seconds per call, over about so many of them."""
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds / 9:
        call()
        count += 1
    return (time.perf_counter() - begun) / count
