"""Helpers for tests of how the inductor engine rewrites a graph before it generates code."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import poptorch


def train_once(model: nn.Module, engine: str, *batch: torch.Tensor, lr: float = 0.1) -> tuple[Any, Any]:
    """The executor after one step of SGD, and what the step returned."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    executor = poptorch.trainingModel(model, poptorch.Options().engine(engine), optimizer)
    return executor, executor(*batch)


def targets_after(rewrite, executor) -> list[Any]:
    """What the nodes of an executor's step call after a rewrite."""
    graph = executor._executable.step.functional_ops().graph
    rewrite(graph)
    graph.lint()
    return [node.target for node in graph.nodes]
