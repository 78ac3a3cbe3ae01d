"""Decide whether the micro-batches of an update are computed side by side, by one wide program.

That saves the cost that every run of a program has, and gives each op more rows to work on. Where micro-batches are
large there is nothing to gain, and the memory for activations grows with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from poptorch._logging import logger
from poptorch.compiler.accumulate import has_update, split_update
from poptorch.compiler.wide import NO_GROUPS, CannotWiden, Groups, Widened, exchanges, normalises_images, widen
from poptorch.enums import MeanReductionStrategy, ReductionType
from poptorch.errors import CompileError, explain
from poptorch.executable import AnchorPlan, Grouping
from poptorch.ir import Role, StepGraph, is_control, is_update, value_of
from poptorch.ir.ops import has_effect
from poptorch.options import Settings

_MANY_BYTES = 2**24  # of activations in one micro-batch, from where on there is nothing to gain


@dataclass(frozen=True)
class Side:
    """A step, for one micro-batch or for all of an update, and the update if it has to be a program of its own."""

    step: StepGraph
    is_wide: bool
    update: StepGraph | None = None
    groups: Groups = NO_GROUPS


def put_side_by_side(
    graph: StepGraph, groupings: Sequence[Grouping], anchors: Sequence[AnchorPlan], settings: Settings
) -> Side:
    """The step for all micro-batches of an update if that is better, otherwise as it is."""
    chosen, width = settings.engine.side_by_side, settings.batching.micro_batches_per_update
    is_needed = exchanges(graph)
    if settings.processes.in_order:
        chosen = False
    if width == 1 or (chosen is False and not is_needed):
        return Side(graph, is_wide=False)
    chosen = True if is_needed else chosen
    try:
        _check(graph, anchors, settings)
        if chosen is None and activation_bytes(graph) > _MANY_BYTES:
            raise CannotWiden("micro-batches are large enough by themselves")
        if chosen is None and groupings:
            raise CannotWiden(f"groups of replicas have values of their own for {groupings[0].name}")
        if chosen is None and normalises_images(graph):
            raise CannotWiden("the statistics of images are computed faster for one micro-batch at a time")
        update, groups = _grouped(graph, groupings, settings)
        widened = _widen(graph, groups, settings)
        if chosen is None and widened.repeated:
            raise CannotWiden(f"{widened.repeated} ops would be repeated for every micro-batch")
    except CannotWiden as reason:
        if is_needed:
            raise _cannot_exchange(reason) from reason
        tell = logger.warning if chosen else logger.debug
        tell("the micro-batches of an update run one after the other: %s", reason)
        return Side(graph, is_wide=False)
    return Side(widened.graph, is_wide=True, update=update, groups=groups)


def _grouped(graph: StepGraph, groupings: Sequence[Grouping], settings: Settings) -> tuple[StepGraph | None, Groups]:
    """The update, if it cannot be part of a wide step, and what that must know about groups of replicas.

    That is so for weights that groups have of their own, and for gradients that other processes add to.
    """
    of_replicas = {grouping.name: grouping.of_replicas for grouping in groupings}
    is_apart = bool(groupings) or settings.processes.count > 1
    if not is_apart or not settings.is_training or not has_update(graph):
        return None, Groups(of_replicas, {})
    post = replace(settings, training=replace(settings.training, mean_reduction=MeanReductionStrategy.Post))
    step, update = split_update(graph, post, settings.batching.micro_batches_per_update)
    accumulators = {spec.owner: spec for spec in step.signature.state if spec.role is Role.ACCUMULATOR}
    return update, Groups(of_replicas, accumulators)


def _cannot_exchange(reason: CannotWiden) -> CompileError:
    return CompileError(
        explain(
            "replicas of this model exchange values inside forward, but cannot be computed side by side.",
            reason=str(reason),
            fix="change what the reason names, or use one replica",
        )
    )


def _widen(graph: StepGraph, groups: Groups, settings: Settings) -> Widened:
    plan = settings.batching
    averages = settings.training.reduction is ReductionType.Mean
    return widen(graph, plan.micro_batches_per_update, plan.replicas, averages=averages, groups=groups)


def _check(graph: StepGraph, anchors: Sequence[AnchorPlan], settings: Settings) -> None:
    """Raise for what only has a meaning if micro-batches run one after the other."""
    plan = settings.batching
    if settings.precision.floating_point_checks:
        raise CannotWiden("a floating-point exception belongs to one micro-batch")
    special = next((node for node in graph.ops.nodes if has_effect(node) or is_control(node)), None)
    if special is not None:
        raise CannotWiden(f"{special.target} runs for one micro-batch at a time")
    written = graph.signature.written
    if plan.input_group_size > 1 and any(spec.name in written for spec in graph.signature.user_inputs):
        raise CannotWiden("replicas share arguments that forward changes")
    updated = {spec.name for spec, node in graph.outputs if is_update(node)}
    if any(anchor.state in written - updated for anchor in anchors):
        raise CannotWiden("every micro-batch is asked for a buffer that it changes")


def activation_bytes(graph: StepGraph) -> int:
    """What a micro-batch computes before the update, in bytes."""
    found = 0
    for node in graph.ops.nodes:
        value = value_of(node)
        if node.op == "call_function" and not is_update(node) and isinstance(value, torch.Tensor):
            found += value.numel() * value.element_size()
    return found
