"""Training in half precision against float32, on the same engine, in one process and in turns.

There are two ways to train with 16-bit floats: a model that was `half()`, and float32 weights that are fed float16. In
the second way, an embedding's rows are cast to float16, because what it is fed are integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.peers import train_poptorch
from benchmarks.timing import interleaved
from benchmarks.workloads import WORKLOADS, Workload

ROUND_SECONDS = 0.06  # a round takes about this long for each of the three
WARM_UP = 3


def half_cost(workload: str, rounds: int) -> dict[str, Any]:
    """Microseconds of a step in float32, of the model's half() and of float32 weights with float16 activations."""
    kinds = {"float": lambda w: w, "half": halved, "mixed": mixed}
    steps = {name: _step(kind(WORKLOADS[workload])) for name, kind in kinds.items()}
    once = interleaved(tuple(steps.values()), (3,) * len(steps), 1)
    calls = max(3, int(ROUND_SECONDS * 1e6 / min(once)))
    times = interleaved(tuple(steps.values()), (calls,) * len(steps), rounds)
    return {f"{name}_us": time for name, time in zip(steps, times, strict=True)}


def halved(workload: Workload) -> Workload:
    """The same workload with 16-bit weights and activations."""
    return replace(workload, dtype=torch.float16)


def mixed(workload: Workload) -> Workload:
    """The same workload with 32-bit weights and 16-bit activations."""

    def network() -> nn.Module:
        made = workload.network_factory()
        for module in made.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(lambda module, arguments, rows: rows.half())
        return made

    return replace(workload, network_factory=network, fed=torch.float16)


def _step(workload: Workload) -> Callable[[], Any]:
    runner = train_poptorch(workload)
    for call in range(WARM_UP):
        runner.run(call)
    return lambda: runner.run(0)
