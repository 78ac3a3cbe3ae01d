"""module + optimiser + example batch → one `StepGraph`.

PyTorch's tracing internals appear in this folder alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from poptorch.capture.context import current_marks, is_capturing
from poptorch.capture.trace import NARROWED, Call, trace_step
from poptorch.capture.update import TrainedGroup, join_update, trained_groups
from poptorch.errors import OptimizerError
from poptorch.ir import OutputRole, StepGraph
from poptorch.ir.structure import Layout
from poptorch.optim import GroupPlan

__all__ = [
    "NARROWED",
    "Call",
    "Captured",
    "TrainedGroup",
    "capture_inference",
    "capture_training",
    "current_marks",
    "is_capturing",
]


@dataclass(frozen=True)
class Captured:
    """What capture hands on: the graph of a step, the layout of its result, and the groups it trains."""

    graph: StepGraph
    result: Layout
    groups: tuple[TrainedGroup, ...] = ()


def capture_inference(module: nn.Module, call: Call) -> Captured:
    """The forward pass as one graph."""
    traced = trace_step(module, call, training=False)
    return Captured(traced.graph, traced.result)


def capture_training(module: nn.Module, call: Call, plans: Sequence[GroupPlan]) -> Captured:
    """Forward, backward and update as one graph."""
    traced = trace_step(module, call, training=True)
    reached = {spec.name for spec in traced.graph.signature.outputs if spec.role is OutputRole.GRADIENT}
    groups = trained_groups(module, plans, reached)
    if not groups:
        raise OptimizerError("no parameter of the optimiser is reached by the loss: there is nothing to train.")
    return Captured(join_update(traced.graph, groups), traced.result, groups)
