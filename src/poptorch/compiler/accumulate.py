"""Cut a training step into the part that runs for every micro-batch and the part that runs once per update.

The first part adds each gradient to an accumulator, in place, or keeps the mean of those so far. The second part
reduces the accumulators, applies the update rules, and leaves the accumulators at zero for the next round. Where an
update has one run only, there is nothing to add: a gradient is written over what the accumulator had before.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from poptorch.enums import MeanReductionStrategy, ReductionType
from poptorch.ir import (
    Direction,
    GraphBuilder,
    InputSpec,
    Note,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    is_update,
    value_of,
)
from poptorch.options import Settings

aten = torch.ops.aten


def split_update(graph: StepGraph, settings: Settings, runs: int) -> tuple[StepGraph, StepGraph]:
    """The graph of a run and the per-update graph of a training step, of which an update has so many runs."""
    gradients = trained_gradients(graph)
    parameters = {spec.name: spec for spec in graph.signature.inputs}
    types = {s.name: s.accumulated_as for s, _ in graph.outputs if s.role is OutputRole.GRADIENT}
    accumulators = {
        name: replace(
            parameters[name],
            name=f"{name}:accumulator",
            key="accumulator",
            role=Role.ACCUMULATOR,
            dtype=types[name] or _sum_type(value_of(gradient).dtype),
        )
        for name, gradient in gradients.items()
    }
    running, divisor = _mean(settings, runs)
    added = frozenset(name for name, gradient in gradients.items() if runs > 1 or gradient.target in _OF_FEW_ROWS)
    step = _micro_step(graph, gradients, accumulators, added, running=running)
    rounded = frozenset(name for name, dtype in types.items() if dtype is None)
    return step, _update(graph, gradients, accumulators, divisor, rounded, added, running=running)


def _mean(settings: Settings, runs: int) -> tuple[bool, int]:
    """Whether accumulators hold the mean of the gradients so far, and what they are divided by in the end."""
    processes = settings.processes
    if settings.training.reduction is not ReductionType.Mean:
        return False, 1
    if not keeps_running_mean(settings):
        return False, runs * processes.count
    if processes.in_order:  # they are added up one by one when they are reduced, and averaged there
        return False, 1
    return runs > 1, processes.count


def keeps_running_mean(settings: Settings) -> bool:
    """Whether gradients are averaged while they are added up, not at the end."""
    mean = settings.training.reduction is ReductionType.Mean
    return mean and settings.training.mean_reduction is MeanReductionStrategy.Running


def trained_gradients(graph: StepGraph) -> dict[str, fx.Node]:
    """The gradient of each parameter that the update changes."""
    trained = {s.name for s, n in graph.outputs if s.role is OutputRole.NEW_VALUE and is_update(n)}
    return {s.name: n for s, n in graph.outputs if s.role is OutputRole.GRADIENT and s.name in trained}


def reduced(
    builder: GraphBuilder, note: Note, total: fx.Node, added_as: torch.dtype | None, dtype: torch.dtype, divisor: int
) -> fx.Node:
    """What enters the update, from the sum of gradients of a type.

    They were added up in the type that was chosen. If none was, the result is rounded to the type that they had.
    """
    total = builder.cast(note, total, added_as or _sum_type(dtype))
    total = builder.cast(note, total, torch.promote_types(value_of(total).dtype, dtype))
    if divisor > 1:
        total = builder.call(note, aten.mul.Tensor, total, 1.0 / divisor)
    return builder.cast(note, total, dtype) if added_as is None else total


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients are added up if nobody chooses one: a sum may exceed float16 where the mean fits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def has_update(graph: StepGraph) -> bool:
    """Whether a training step changes any weight: it does not if its loss reaches none."""
    return any(is_update(node) for node in graph.ops.nodes)


def drop_intermediates(graph: StepGraph) -> StepGraph:
    """The step without the outputs that only matter where it is cut, for when nothing has to be accumulated."""
    cut = (OutputRole.GRADIENT, OutputRole.VALUE_BEFORE_UPDATE)
    builder = GraphBuilder()
    builder.inputs(graph.inputs)
    builder.copy(graph.ops.nodes)
    for spec, node in graph.outputs:
        if spec.role not in cut:
            builder.output(spec, builder.copies[node])
    return builder.build(graph.name, guards=graph.guards, constants=graph.constants, graphs=graph.graphs)


_OF_FEW_ROWS = (aten.embedding_dense_backward.default,)  # engines add those rows, and leave the others as they are
_ADDING, _UPDATING = Note(Direction.BACKWARD), Note(Direction.UPDATE)
_COUNT = InputSpec("accumulated:count", Role.ACCUMULATOR, (), torch.float32, ())  # gradients in a running mean


def _micro_step(
    graph: StepGraph,
    gradients: dict[str, fx.Node],
    accumulators: dict[str, InputSpec],
    added: frozenset[str],  # the gradients that are added to what is there; the others take its place
    *,
    running: bool,
) -> StepGraph:
    builder = GraphBuilder()
    needed = _used_outside_update(graph)
    builder.inputs(
        (s, n) for s, n in graph.inputs if s.role is Role.USER_INPUT or n in needed or n in gradients.values()
    )
    totals = {name: builder.input(spec) for name, spec in accumulators.items()}
    count = builder.input(_COUNT) if running else None
    builder.copy(node for node in graph.ops.nodes if not is_update(node))
    for spec, node in graph.outputs:
        if spec.role is not OutputRole.GRADIENT and not is_update(node):
            is_early = spec.role is OutputRole.VALUE_BEFORE_UPDATE
            builder.output(replace(spec, role=OutputRole.NEW_VALUE) if is_early else spec, builder.copies[node])
    weight = None
    if count is not None:
        now = builder.call(_ADDING, aten.add.Tensor, count, 1.0)
        builder.output(OutputSpec(_COUNT.name, OutputRole.NEW_VALUE), now)
        weight = builder.call(_ADDING, aten.reciprocal.default, now)
    for name, spec in accumulators.items():
        total = totals[name]
        new = builder.cast(_ADDING, builder.copies[gradients[name]], spec.dtype)
        if weight is not None:  # the new mean is the old one, moved towards the gradient
            away = builder.call(_ADDING, aten.sub.Tensor, new, total)
            new = builder.call(_ADDING, aten.mul.Tensor, away, weight)
        if name in added:
            new = builder.call(_ADDING, aten.add.Tensor, total, new)
        builder.output(OutputSpec(spec.name, OutputRole.NEW_VALUE), new)
    return builder.build("micro_step", guards=graph.guards, constants=graph.constants, graphs=graph.graphs)


def _written_before_update(graph: StepGraph) -> dict[str, fx.Node]:
    """The inputs that the per-micro-batch part gives a new value, with that value."""
    roles = (OutputRole.NEW_VALUE, OutputRole.VALUE_BEFORE_UPDATE)
    return {spec.name: node for spec, node in graph.outputs if spec.role in roles and not is_update(node)}


def _used_outside_update(graph: StepGraph) -> set[fx.Node]:
    """The inputs that the per-micro-batch part reads, or writes a new value for."""
    written = _written_before_update(graph)
    returned = {result for spec, result in graph.outputs if spec.role is OutputRole.USER_OUTPUT}
    return {
        node
        for spec, node in graph.inputs
        if spec.name in written
        or any(not is_update(user) and user.op == "call_function" for user in node.users)
        or node in returned
    }


def _update(
    graph: StepGraph,
    gradients: dict[str, fx.Node],
    accumulators: dict[str, InputSpec],
    divisor: int,
    rounded: frozenset[str],  # the gradients that enter the update in the type that they had before they were added up
    added: frozenset[str],  # those that are added to zero in the next round
    *,
    running: bool,
) -> StepGraph:
    builder = GraphBuilder()
    changed_before = _written_before_update(graph)
    for spec, node in graph.inputs:
        used = any(is_update(user) for user in node.users) or spec.name in accumulators
        if spec.role is not Role.USER_INPUT and used:
            copied = builder.input(spec, node)
            if spec.name in changed_before:  # the micro-steps wrote it already
                builder.copies[changed_before[spec.name]] = copied
    totals = {name: builder.input(spec) for name, spec in accumulators.items()}
    cleared = {accumulators[name].name: total for name, total in totals.items() if name in added}
    if running:
        cleared[_COUNT.name] = builder.input(_COUNT)
    for name, spec in accumulators.items():
        gradient, chosen = gradients[name], None if name in rounded else spec.dtype
        total = reduced(builder, _UPDATING, totals[name], chosen, value_of(gradient).dtype, divisor)
        builder.copies[gradient] = total
    builder.copy(node for node in graph.ops.nodes if is_update(node))
    for spec, node in graph.outputs:
        if spec.role is OutputRole.NEW_VALUE and is_update(node):
            builder.output(spec, builder.copies[node])
    for name, node in cleared.items():
        zero = builder.call(_UPDATING, aten.zeros_like.default, node)
        builder.output(OutputSpec(name, OutputRole.NEW_VALUE), zero)
    return builder.build("update", constants=graph.constants, graphs=graph.graphs)
