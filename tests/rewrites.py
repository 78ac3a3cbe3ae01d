"""Helpers for tests of host passes: what a pass makes of the step of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import poptorch
from poptorch.engines.host import Host, HostPass, run_host_passes, unobserved
from poptorch.engines.passes.eager import EAGER
from poptorch.ir import StepGraph


def train_once(model: nn.Module, engine: str, *batch: torch.Tensor, lr: float = 0.1) -> tuple[Any, Any]:
    """The executor after one step of SGD, and what the step returned."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    executor = poptorch.trainingModel(model, poptorch.Options().engine(engine), optimizer)
    return executor, executor(*batch)


def after(executor: Any, *passes: HostPass) -> StepGraph:
    """The graph of an executor's step after host passes, each verified."""
    step = executor._executable.step
    return run_host_passes(step.graph, Host(fixed=step.fixed), passes, unobserved)


def changes(executor: Any, apply: HostPass) -> bool:
    """Whether a pass finds anything to do."""
    return after(executor, apply) is not executor._executable.step.graph


def on_eager(executor: Any) -> StepGraph:
    """The step as the eager engine runs it."""
    return after(executor, *EAGER)


def targets(graph: StepGraph) -> list[Any]:
    """What the ops of a graph call."""
    return [node.target for node in graph.ops.nodes if node.op == "call_function"]
