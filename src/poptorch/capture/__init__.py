"""module + optimiser + example batch → one `StepGraph`.

PyTorch's tracing internals appear in this folder alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from poptorch.capture.context import current_marks, is_capturing, on_device
from poptorch.capture.trace import NARROWED, Call, trace_step
from poptorch.capture.update import (
    LOSS_SCALING,
    SCALE_FACTOR,
    TrainedGroup,
    Update,
    join_update,
    loss_scales,
    trained_groups,
)
from poptorch.errors import OptimizerError
from poptorch.ir import OutputRole, StepGraph
from poptorch.ir.structure import Layout
from poptorch.optim.gradients import Clipping
from poptorch.optim.plan import OptimizerPlan
from poptorch.options import Settings

__all__ = [
    "LOSS_SCALING",
    "NARROWED",
    "SCALE_FACTOR",
    "Call",
    "Captured",
    "TrainedGroup",
    "capture_inference",
    "capture_training",
    "current_marks",
    "is_capturing",
    "on_device",
]


@dataclass(frozen=True)
class Captured:
    """What capture hands on: the graph of a step, the layout of its result, and the groups it trains."""

    graph: StepGraph
    result: Layout
    groups: tuple[TrainedGroup, ...] = ()


def capture_inference(module: nn.Module, call: Call, settings: Settings) -> Captured:
    """The forward pass as one graph."""
    traced = trace_step(module, call, training=False, casting=settings.half_float_casting)
    return Captured(traced.graph, traced.result)


def capture_training(module: nn.Module, call: Call, plans: Sequence[OptimizerPlan], settings: Settings) -> Captured:
    """Forward, backward and update as one graph."""
    scales = loss_scales(plans, automatic=settings.automatic_loss_scaling)
    traced = trace_step(module, call, training=True, casting=settings.half_float_casting, scales=scales)
    reached = {spec.name for spec in traced.graph.signature.outputs if spec.role is OutputRole.GRADIENT}
    groups = trained_groups(module, plans, reached)
    if not groups:
        raise OptimizerError("no parameter of the optimiser is reached by the loss: there is nothing to train.")
    max_norm, norm_type = settings.clip_norm or (None, 2.0)
    update = Update(tuple(plans), groups, Clipping(max_norm, norm_type, settings.clip_value), scales)
    return Captured(join_update(traced.graph, update), traced.result, groups)
