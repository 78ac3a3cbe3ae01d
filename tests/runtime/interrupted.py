"""Train a model under random interrupts and compare it with a twin that nobody interrupts.

Run as a program: `interrupted.py ENGINE OPTIMISER BODY ACCUMULATION INTERRUPTS SEED`. After every interrupt the model
must be where the twin is, or one whole update further: parameters, buffers, optimiser state and random numbers alike.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

import poptorch

BODIES = {
    "plain": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
    "batch_norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3)),
}
OPTIMISERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


class Model(nn.Module):
    def __init__(self, body: str) -> None:
        super().__init__()
        self.body = BODIES[body]()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(x), y)


class Trained:
    """A model in training, and all of its state."""

    def __init__(self, engine: str, optimiser: str, body: str, accumulation: int) -> None:
        torch.manual_seed(0)
        self.model = Model(body)
        self.optimizer = OPTIMISERS[optimiser](self.model.parameters())
        options = poptorch.Options().engine(engine).randomSeed(3).showCompilationProgressBar(False)
        options.Training.gradientAccumulation(accumulation)
        self.rows = 4 * accumulation
        self.executor = poptorch.trainingModel(self.model, options, self.optimizer)
        self.step(0)

    def step(self, index: int) -> float:
        """Train on a batch; gives the seconds that it took."""
        begun = time.perf_counter()
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(self.rows, 6, generator=generator)
        self.executor(x, torch.randint(3, (self.rows,), generator=generator))
        return time.perf_counter() - begun

    def state(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.executor.rng_state))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def main(engine: str, optimiser: str, body: str, accumulation: int, interrupts: int, seed: int) -> None:
    chance = random.Random(seed)
    ours, twin = (Trained(engine, optimiser, body, accumulation) for _ in range(2))
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    for index in range(1, 6):  # the first ones are slow
        ours.step(index)
        duration = twin.step(index)
    index, arrived, finished = 6, 0, 0
    while arrived < interrupts:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, chance.uniform(0.0, 1.2) * duration))
            ours.step(index)
            signal.setitimer(signal.ITIMER_REAL, 0)
            duration = twin.step(index)  # of the last call: how busy the machine is changes
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
            arrived += 1
            if not same(ours.state(), twin.state()):
                twin.step(index)
                finished += 1
            else:
                continue
        assert same(ours.state(), twin.state()), f"torn by interrupt {arrived} in step {index}"
        index += 1
    print(f"{arrived} interrupts, {finished} after the update was done")


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
