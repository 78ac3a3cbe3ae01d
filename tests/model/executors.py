"""Executors on the eager engine for tests, and batches for them."""

from __future__ import annotations

import copy

import torch
from torch import nn

import poptorch


def options(**counts: int) -> poptorch.Options:
    made = poptorch.Options().engine("eager").deviceIterations(counts.get("D", 1)).replicationFactor(counts.get("R", 1))
    made.Training.gradientAccumulation(counts.get("G", 1))
    return made


def sgd(module: nn.Module, lr: float = 0.1, **settings: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr, **settings)


def batch(rows: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


def train(module: nn.Module, optimizer=None, **counts: int) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(module, options(**counts), optimizer or sgd(module))


def infer(module, **counts: int) -> poptorch.PoplarExecutor:
    return poptorch.inferenceModel(module, options(**counts))


def snapshot(module: nn.Module, optimizer: torch.optim.Optimizer | None = None):
    """A deep copy of everything that training may change."""
    return copy.deepcopy((module.state_dict(), optimizer.state_dict() if optimizer else None))


def assert_same(before, after) -> None:
    torch.testing.assert_close(after, before, rtol=0, atol=0)
