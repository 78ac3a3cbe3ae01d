"""Capture from end to end: trace the module, find what is trained, join the update."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from poptorch._logging import logger
from poptorch.capture.call import Call, Captured
from poptorch.capture.trace import trace_step
from poptorch.capture.trained import Update, loss_scales, trained_groups
from poptorch.capture.update import join_update
from poptorch.errors import explain
from poptorch.ir import OutputRole
from poptorch.optim.gradients import Clipping, check_scaling
from poptorch.optim.plan import OptimizerPlan
from poptorch.options import Settings


def capture_inference(module: nn.Module, call: Call, settings: Settings) -> Captured:
    """The forward pass as one graph."""
    traced = trace_step(module, call, settings)
    return Captured(traced.graph, traced.result)


def capture_training(module: nn.Module, call: Call, plans: Sequence[OptimizerPlan], settings: Settings) -> Captured:
    """Forward, backward and update as one graph."""
    scales = loss_scales(plans, automatic=settings.training.automatic_loss_scaling)
    traced = trace_step(module, call, settings, scales)
    for plan in plans if scales else ():
        check_scaling(plan.loss_scaling.value, traced.loss_type)
    outputs = traced.graph.signature.outputs
    reached = frozenset(spec.name for spec in outputs if spec.role is OutputRole.GRADIENT)
    trained = trained_groups(module, plans, reached)
    if not trained:
        if reached:
            _warn_untrained(plans)
        return Captured(traced.graph, traced.result, (), traced.loss_type, reached)
    max_norm, norm_type = settings.training.clip_norm or (None, 2.0)
    clipping = Clipping(max_norm, norm_type, settings.training.clip_value)
    update = Update(tuple(plans), trained, clipping, scales, traced.loss_type)
    return Captured(join_update(traced.graph, update), traced.result, trained, traced.loss_type, reached)


def _warn_untrained(plans: Sequence[OptimizerPlan]) -> None:
    groups = [len(group.params) for plan in plans for group in plan.groups]
    logger.warning(
        "%s",
        explain(
            "no parameter of the optimiser is reached by the loss: nothing is trained.",
            optimiser=f"{sum(groups)} parameters that require a gradient in {len(groups)} group(s)",
            fix="build the optimiser from parameters that forward uses, and call setOptimizer if groups were added",
        ),
    )
