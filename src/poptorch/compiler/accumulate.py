"""Cut a training step into the part that runs for every micro-batch and the part that runs once per update.

The first part adds each gradient to an accumulator, in place, or keeps the mean of those so far. The second part
reduces the accumulators, applies the update rules, and leaves the accumulators at zero for the next round.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.enums import MeanReductionStrategy, ReductionType
from poptorch.ir import (
    InputSpec,
    Note,
    OutputRole,
    OutputSpec,
    Phase,
    Role,
    Signature,
    StepGraph,
    annotation,
    note_of,
    value_of,
)
from poptorch.ir.ops import Op
from poptorch.options import Settings

aten = torch.ops.aten


def split_update(graph: StepGraph, settings: Settings) -> tuple[StepGraph, StepGraph]:
    """The per-micro-batch graph and the per-update graph of a training step."""
    gradients = {s.name: n for s, n in _outputs(graph) if s.role is OutputRole.GRADIENT}
    trained = {s.name for s, n in _outputs(graph) if s.role is OutputRole.NEW_VALUE and _is_update(n)}
    gradients = {name: node for name, node in gradients.items() if name in trained}
    parameters = {spec.name: spec for spec in graph.signature.inputs}
    types = {s.name: s.accumulated_as for s, _ in _outputs(graph) if s.role is OutputRole.GRADIENT}
    accumulators = {
        name: replace(
            parameters[name],
            name=f"{name}:accumulator",
            role=Role.ACCUMULATOR,
            dtype=types[name] or value_of(gradient).dtype,
        )
        for name, gradient in gradients.items()
    }
    running = settings.reduction is ReductionType.Mean and settings.strategy is MeanReductionStrategy.Running
    is_mean = settings.reduction is ReductionType.Mean and not running
    divisor = settings.batching.micro_batches_per_update if is_mean else 1
    step = _micro_step(graph, gradients, accumulators, running=running)
    return step, _update(graph, gradients, accumulators, divisor, running=running)


def drop_intermediates(graph: StepGraph) -> StepGraph:
    """The step without the outputs that only matter where it is cut, for when nothing has to be accumulated."""
    cut = (OutputRole.GRADIENT, OutputRole.VALUE_BEFORE_UPDATE)
    kept = [(spec, node) for spec, node in _outputs(graph) if spec.role not in cut]
    names = {node: node.name for _, node in kept}
    ops = graph.copy_ops()
    by_name = {node.name: node for node in ops.nodes}
    ops.output_node().args = (tuple(by_name[names[node]] for _, node in kept),)
    ops.eliminate_dead_code()
    return replace(graph, ops=ops, signature=replace(graph.signature, outputs=tuple(spec for spec, _ in kept)))


def _outputs(graph: StepGraph) -> list[tuple[OutputSpec, fx.Node]]:
    return list(zip(graph.signature.outputs, graph.results, strict=True))


def _is_update(node: fx.Node) -> bool:
    note = note_of(node)
    return node.op == "call_function" and note is not None and note.phase is Phase.UPDATE


class _Builder:
    """Collects the inputs, ops and outputs of a new graph."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs: list[InputSpec] = []
        self.outputs: list[tuple[OutputSpec, fx.Node]] = []

    def input(self, spec: InputSpec, value: object) -> fx.Node:
        node = self.graph.placeholder(f"in{len(self.inputs)}")
        node.meta["val"] = value
        self.inputs.append(spec)
        return node

    def accumulator(self, spec: InputSpec, like: torch.Tensor) -> fx.Node:
        return self.input(spec, like.to(spec.dtype))

    def call(self, phase: Phase, target: Op[..., Any], *args: object, like: object, **kwargs: object) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)  # pyright: ignore
        node.meta = {"val": like, "custom": annotation(Note(phase))}
        return node

    def cast(self, phase: Phase, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        value: torch.Tensor = value_of(node)
        if value.dtype == dtype:
            return node
        return self.call(phase, aten._to_copy.default, node, dtype=dtype, like=value.to(dtype))

    def build(self, origin: StepGraph, name: str) -> StepGraph:
        self.graph.output(tuple(node for _, node in self.outputs))
        self.graph.eliminate_dead_code()
        signature = Signature(tuple(self.inputs), tuple(spec for spec, _ in self.outputs))
        return replace(origin, name=name, ops=self.graph, signature=signature)


_COUNT = InputSpec("accumulated:count", Role.ACCUMULATOR, (), torch.float32, ())  # gradients in a running mean


def _micro_step(
    graph: StepGraph, gradients: dict[str, fx.Node], accumulators: dict[str, InputSpec], *, running: bool
) -> StepGraph:
    builder = _Builder()
    copies: dict[fx.Node, fx.Node] = {}
    totals: dict[str, fx.Node] = {}
    needed = _used_outside_update(graph)
    pairs = list(zip(graph.signature.inputs, graph.placeholders, strict=True))
    for spec, node in pairs:
        if spec.role is not Role.USER_INPUT and (node in needed or node in gradients.values()):
            copies[node] = builder.input(spec, value_of(node))
    for name, spec in accumulators.items():
        totals[name] = builder.accumulator(spec, value_of(gradients[name]))
    count = builder.accumulator(_COUNT, value_of(graph.placeholders[0]).new_empty(())) if running else None
    for spec, node in pairs:
        if spec.role is Role.USER_INPUT:
            copies[node] = builder.input(spec, value_of(node))
    for node in graph.ops.nodes:
        if node.op == "call_function" and not _is_update(node):
            copies[node] = builder.graph.node_copy(node, lambda n: copies[n])
    builder.outputs = [
        (
            replace(spec, role=OutputRole.NEW_VALUE) if spec.role is OutputRole.VALUE_BEFORE_UPDATE else spec,
            copies[node],
        )
        for spec, node in _outputs(graph)
        if spec.role is not OutputRole.GRADIENT and not _is_update(node)
    ]
    weight = None
    if count is not None:
        now = builder.call(Phase.BACKWARD, aten.add.Tensor, count, 1.0, like=value_of(count))
        builder.outputs.append((OutputSpec(_COUNT.name, OutputRole.NEW_VALUE), now))
        weight = builder.call(Phase.BACKWARD, aten.reciprocal.default, now, like=value_of(count))
    for name, spec in accumulators.items():
        total, like = totals[name], value_of(totals[name])
        added = builder.cast(Phase.BACKWARD, copies[gradients[name]], spec.dtype)
        if weight is not None:  # the new mean is the old one, moved towards the gradient
            away = builder.call(Phase.BACKWARD, aten.sub.Tensor, added, total, like=like)
            added = builder.call(Phase.BACKWARD, aten.mul.Tensor, away, weight, like=like)
        total = builder.call(Phase.BACKWARD, aten.add.Tensor, total, added, like=like)
        builder.outputs.append((OutputSpec(spec.name, OutputRole.NEW_VALUE), total))
    return builder.build(graph, "micro_step")


def _written_before_update(graph: StepGraph) -> dict[str, fx.Node]:
    """The inputs that the per-micro-batch part gives a new value, with that value."""
    roles = (OutputRole.NEW_VALUE, OutputRole.VALUE_BEFORE_UPDATE)
    return {spec.name: node for spec, node in _outputs(graph) if spec.role in roles and not _is_update(node)}


def _used_outside_update(graph: StepGraph) -> set[fx.Node]:
    """The inputs that the per-micro-batch part reads, or writes a new value for."""
    written = _written_before_update(graph)
    returned = {result for spec, result in _outputs(graph) if spec.role is OutputRole.USER_OUTPUT}
    pairs = zip(graph.signature.inputs, graph.placeholders, strict=True)
    return {
        node
        for spec, node in pairs
        if spec.name in written
        or any(not _is_update(user) and user.op == "call_function" for user in node.users)
        or node in returned
    }


def _update(
    graph: StepGraph,
    gradients: dict[str, fx.Node],
    accumulators: dict[str, InputSpec],
    divisor: int,
    *,
    running: bool,
) -> StepGraph:
    builder = _Builder()
    copies: dict[fx.Node, fx.Node] = {}
    totals: dict[str, fx.Node] = {}
    changed_before = _written_before_update(graph)
    for spec, node in zip(graph.signature.inputs, graph.placeholders, strict=True):
        used = any(_is_update(user) for user in node.users) or spec.name in accumulators
        if spec.role is not Role.USER_INPUT and used:
            copies[node] = builder.input(spec, value_of(node))
            if spec.name in changed_before:  # the micro-steps wrote it already
                copies[changed_before[spec.name]] = copies[node]
    for name, spec in accumulators.items():
        totals[name] = builder.accumulator(spec, value_of(gradients[name]))
    cleared = {spec.name: totals[name] for name, spec in accumulators.items()}
    if running:
        cleared[_COUNT.name] = builder.accumulator(_COUNT, value_of(graph.placeholders[0]).new_empty(()))
    for name, total in totals.items():
        gradient = gradients[name]
        wider = torch.promote_types(value_of(total).dtype, value_of(gradient).dtype)
        total = builder.cast(Phase.UPDATE, total, wider)
        if divisor > 1:
            total = builder.call(Phase.UPDATE, aten.mul.Tensor, total, 1.0 / divisor, like=value_of(total))
        copies[gradient] = total
    for node in graph.ops.nodes:
        if _is_update(node):
            copies[node] = builder.graph.node_copy(node, lambda n: copies[n])
    builder.outputs = [
        (spec, copies[node]) for spec, node in _outputs(graph) if spec.role is OutputRole.NEW_VALUE and _is_update(node)
    ]
    for name, node in cleared.items():
        zero = builder.call(Phase.UPDATE, aten.zeros_like.default, node, like=value_of(node))
        builder.outputs.append((OutputSpec(name, OutputRole.NEW_VALUE), zero))
    built = builder.build(graph, "update")
    return replace(built, guards=(), draws_random_numbers=False, constants={})
