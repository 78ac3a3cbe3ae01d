"""Bring what guards find in the bodies of loops and branches out to the graph around them.

A body tells one integer for each of its guards. A loop carries them along: the first that is out of range stays. The
branch that was not chosen tells integers that are in range.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from poptorch.ir import (
    Direction,
    GraphBuilder,
    Guard,
    InputSpec,
    Note,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    choose_graph,
    insert,
    insert_as,
    note_of,
    value_of,
)

aten = torch.ops.aten
Finding = tuple[Guard, fx.Node]


@dataclass(frozen=True)
class GuardedBody:
    """A body with safe indices, and what its guards find: nodes of it, each an integer."""

    graph: StepGraph
    findings: Sequence[Finding]


def tell_findings(
    ops: fx.Graph, node: fx.Node, bodies: Sequence[GuardedBody]
) -> tuple[dict[str, StepGraph], list[Finding]]:
    """Let a node also give what the guards in its bodies find; gives the new bodies, and the findings in this graph."""
    findings = [finding for body in bodies for finding in body.findings]
    if not findings:
        return {body.graph.name: body.graph for body in bodies}, []
    if node.target is choose_graph:
        graphs = [_branch(body, findings) for body in bodies]
    else:
        graphs = _loop(ops, node, bodies, findings)
    before = len(value_of(node))
    node.meta = {**node.meta, "val": tuple(value_of(result) for result in graphs[-1].results)}
    with ops.inserting_before(node.next):
        told = [
            insert_as(ops, node, value_of(node)[before + index], operator.getitem, node, before + index)
            for index in range(len(findings))
        ]
    found = [(guard, each) for (guard, _), each in zip(findings, told, strict=True)]
    return {graph.name: graph for graph in graphs}, found


def _branch(body: GuardedBody, findings: Sequence[Finding]) -> StepGraph:
    """A branch that tells what its own guards find, and something in range for those of the other."""
    own = [node for _, node in body.findings]
    builder, note = _copy(body.graph, len(body.graph.signature.inputs), ())
    _copy_outputs(builder, body.graph)
    for guard, node in findings:
        told = builder.copies[node] if node in own else _in_range(builder, note, guard)
        builder.output(OutputSpec("guard", OutputRole.USER_OUTPUT), told)
    return _built(builder, body.graph)


def _loop(ops: fx.Graph, node: fx.Node, bodies: Sequence[GuardedBody], findings: Sequence[Finding]) -> list[StepGraph]:
    """The graphs of a loop, which carry along the first integer that was out of range."""
    *conditions, body = bodies
    assert not any(condition.findings for condition in conditions)
    arguments: list[Any] = list(node.args)
    count = len(arguments[2])
    with ops.inserting_before(node):
        arguments[2] = [
            *arguments[2],
            *(insert(ops, node, aten.full.default, [], guard.limits[0], dtype=torch.int64) for guard, _ in findings),
        ]
    node.args = tuple(arguments)
    specs = [InputSpec(f"guard{index}", Role.USER_INPUT, (), torch.int64, ()) for index in range(len(findings))]
    graphs = [_condition(condition.graph, count, specs, findings) for condition in conditions]
    builder, note = _copy(body.graph, count, specs)
    _copy_outputs(builder, body.graph)
    for spec, (guard, now) in zip(specs, findings, strict=True):
        before = builder.node(spec.name)
        told = builder.call(note, aten.where.self, _is_safe(builder, note, before, guard), builder.copies[now], before)
        builder.output(OutputSpec(spec.name, OutputRole.USER_OUTPUT), told)
    return [*graphs, _built(builder, body.graph)]


def _condition(graph: StepGraph, count: int, specs: Sequence[InputSpec], findings: Sequence[Finding]) -> StepGraph:
    """The condition of a loop, which ends it after an integer out of range: it might not end otherwise."""
    builder, note = _copy(graph, count, specs)
    ((spec, holds),) = graph.outputs
    goes_on = builder.copies[holds]
    for each, (guard, _) in zip(specs, findings, strict=True):
        is_safe = _is_safe(builder, note, builder.node(each.name), guard)
        goes_on = builder.call(note, aten.logical_and.default, goes_on, is_safe)
    builder.output(spec, goes_on)
    return _built(builder, graph)


def _is_safe(builder: GraphBuilder, note: Note, found: fx.Node | None, guard: Guard) -> fx.Node:
    return builder.call(note, aten.eq.Tensor, builder.call(note, aten.clamp.default, found, *guard.limits), found)


def _in_range(builder: GraphBuilder, note: Note, guard: Guard) -> fx.Node:
    return builder.call(note, aten.full.default, [], guard.limits[0], dtype=torch.int64)


def _copy(graph: StepGraph, position: int, specs: Sequence[InputSpec]) -> tuple[GraphBuilder, Note]:
    """A builder with the same graph, which takes more tensors from a position on; and a note for new ops."""
    builder = GraphBuilder()
    builder.inputs(graph.inputs[:position])
    for spec in specs:
        builder.input(spec)
    builder.inputs(graph.inputs[position:])
    builder.copy(graph.ops.nodes)
    notes = [note for node in graph.ops.nodes if (note := note_of(node)) is not None]
    return builder, notes[0] if notes else Note(Direction.FORWARD)


def _copy_outputs(builder: GraphBuilder, graph: StepGraph) -> None:
    for spec, node in graph.outputs:
        builder.output(spec, builder.copies[node])


def _built(builder: GraphBuilder, graph: StepGraph) -> StepGraph:
    return builder.build(graph.name, graphs=graph.graphs)
