"""What running a model in parts costs or gains against the plain step: time of a call, and peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import poptorch
from benchmarks.resident import peak_kib

WIDTH, BLOCKS, ROWS, MICRO_BATCHES = 256, 16, 1024, 4
ROUNDS = 9


class Chain(nn.Module):
    """Blocks one after the other; each may be a checkpoint, from which the backward pass starts again."""

    def __init__(self, ipus: int, *, checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
            for _ in range(BLOCKS)
        )
        self._ipus, self._checkpoints = ipus, checkpoints

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for index, block in enumerate(self.blocks):
            ipu = self._ipus * index // BLOCKS
            with poptorch.Block(f"part{ipu}", ipu_id=ipu):
                x = block(x)
                x = poptorch.recomputationCheckpoint(x) if self._checkpoints else x
        with poptorch.Block(f"part{self._ipus - 1}", ipu_id=self._ipus - 1):
            return x, nn.functional.mse_loss(x, target)


def placement(kind: str, seconds: float) -> dict[str, Any]:
    """Microseconds per call and peak MiB of a step, plain and of one kind; they take turns."""
    plain, other = _KINDS[kind]
    calls = {"plain": plain(), "other": other()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(_measure(call, seconds / ROUNDS))
    found = {f"{name}_us": 1e6 * statistics.median(each) for name, each in times.items()}
    return {**found, **{f"{name}_mib": peak_kib(call) / 1024 for name, call in calls.items()}}


def _training(
    options: poptorch.Options, micro_batches: int, ipus: int = 1, *, checkpoints: bool = False
) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = Chain(ipus, checkpoints=checkpoints)
    parts = [f"part{ipu}" for ipu in range(ipus)]
    options.setExecutionStrategy(poptorch.PipelinedExecution(*parts) if ipus > 1 else poptorch.ShardedExecution(*parts))
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.01))
    x, target = torch.randn(2, ROWS * micro_batches, WIDTH).unbind()
    for _ in range(3):
        training(x, target)
    return lambda: training(x, target)


def _accumulating(*, stages: bool) -> Callable[[], Any]:
    options = poptorch.Options().engine("inductor").runSideBySide(False).runStages(stages)
    options.Training.gradientAccumulation(MICRO_BATCHES)
    return _training(options, MICRO_BATCHES, ipus=2)


def _replicated(*, folded: bool) -> Callable[[], Any]:
    options = poptorch.Options().engine("inductor").replicationFactor(4).runSideBySide(folded)
    return _training(options, 4)


def _recomputing(*, checkpoints: bool) -> Callable[[], Any]:
    return _training(poptorch.Options().engine("inductor"), 1, checkpoints=checkpoints)


_KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "stages on threads": (lambda: _accumulating(stages=False), lambda: _accumulating(stages=True)),
    "replicas folded": (lambda: _replicated(folded=False), lambda: _replicated(folded=True)),
    "recomputation": (lambda: _recomputing(checkpoints=False), lambda: _recomputing(checkpoints=True)),
}
KINDS = tuple(_KINDS)


def _measure(call: Callable[[], Any], seconds: float) -> float:
    """Seconds per call, over about so many of them."""
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        call()
        count += 1
    return (time.perf_counter() - begun) / count
