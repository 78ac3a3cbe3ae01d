"""A graph that calls others, cut into what code is generated for: one part that is shared, and the calls after it.

The shared part hands its results to the calls in scratch memory. Calls work on state and scratch, seen through views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from poptorch.ir import GraphBuilder, InputSpec, OutputRole, OutputSpec, Role, StepGraph, call_graph, value_of
from poptorch.ir.ops import is_view

aten = torch.ops.aten


@dataclass(frozen=True)
class View:
    """One step from a tensor to a part of it, or to another way to see it."""

    op: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Source:
    """Where an operand of a call comes from: an input of the graph or scratch memory, seen through views."""

    position: int
    is_scratch: bool
    views: tuple[View, ...]

    def find(self, inputs: Sequence[torch.Tensor], scratch: Sequence[torch.Tensor]) -> torch.Tensor:
        tensor = (scratch if self.is_scratch else inputs)[self.position]
        for view in self.views:
            tensor = view.op(tensor, *view.args)
        return tensor


@dataclass(frozen=True)
class GraphCall:
    """One run of a graph."""

    graph: str
    operands: tuple[Source, ...]


@dataclass(frozen=True)
class Cut:
    """The shared part, if there is one, which takes state, scratch memory and the user's tensors; then the calls."""

    shared: StepGraph | None
    shared_state: tuple[int, ...]  # the positions of the state that the shared part takes
    scratch: tuple[InputSpec, ...]
    calls: tuple[GraphCall, ...]


def cut_at_calls(graph: StepGraph) -> Cut:
    """Take the calls out of a graph; every result of a call must be the new value of state that it was given."""
    calls = [node for node in graph.ops.nodes if node.target is call_graph]
    positions = {node: index for index, (_, node) in enumerate(graph.inputs)}
    scratch: dict[fx.Node, InputSpec] = {}
    found: list[GraphCall] = []
    for call in calls:
        name, operands = cast("tuple[str, list[fx.Node]]", call.args)
        sources: list[Source] = []
        for operand in operands:
            base, views = _seen_through(operand)
            if base not in positions and base not in scratch:
                scratch[base] = _scratch_spec(len(scratch), base, views)
            place = positions[base] if base in positions else list(scratch).index(base)
            sources.append(Source(place, base not in positions, tuple(View(v.target, v.args[1:]) for v in views)))
        found.append(GraphCall(name, tuple(sources)))
    shared, state = _shared(graph, scratch, is_whole=not calls)
    return Cut(shared, state, tuple(scratch.values()), tuple(found))


def _seen_through(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What an operand is a view of, and the views from there to it."""
    views: list[fx.Node] = []
    while is_view(node) or node.target is aten.reshape.default:
        views.insert(0, node)
        node = node.all_input_nodes[0]
    return node, views


def _scratch_spec(index: int, node: fx.Node, views: Sequence[fx.Node]) -> InputSpec:
    """Memory for a value: in the order of dimensions in which it is seen as a vector, without gaps."""
    value: torch.Tensor = value_of(node)
    order: list[int] = list(range(value.dim()))
    if views and views[0].target is aten.permute.default:
        order = cast("list[int]", views[0].args[1])
    in_order = torch.empty([value.shape[dim] for dim in order], device="meta")
    like = in_order.permute([order.index(dim) for dim in range(len(order))])
    return InputSpec(f"scratch:{index}", Role.ACCUMULATOR, tuple(value.shape), value.dtype, tuple(like.stride()))


def _shared(
    graph: StepGraph, scratch: dict[fx.Node, InputSpec], *, is_whole: bool
) -> tuple[StepGraph | None, tuple[int, ...]]:
    """Everything but the calls; None if nothing is left."""
    results = [(spec, node) for spec, node in graph.outputs if not _comes_from_call(node)]
    if not results and not scratch and not is_whole:
        return None, ()
    wanted = {*scratch, *(node for _, node in results)}
    ops = [node for node in graph.ops.nodes if node.op == "call_function"]
    for node in reversed(ops):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    written = {spec.name for spec, _ in results if spec.role is OutputRole.NEW_VALUE}
    builder = GraphBuilder()
    state: list[int] = []
    for position, (spec, node) in enumerate(graph.inputs):
        if not spec.role.is_state:
            builder.input(spec, node)
        elif node in wanted or spec.name in written:
            builder.input(spec, node)
            state.append(position)
    for spec in scratch.values():
        builder.input(spec)
    builder.copy(node for node in ops if node in wanted)
    for spec, node in results:
        builder.output(spec, builder.copies[node])
    for node, spec in scratch.items():
        builder.output(OutputSpec(spec.name, OutputRole.NEW_VALUE), builder.copies[node])
    name = f"{graph.name}-shared"
    shared = builder.build(name, guards=graph.guards, constants=graph.constants, graphs=graph.graphs)
    return shared, tuple(state)


def _comes_from_call(node: fx.Node) -> bool:
    base, _ = _seen_through(node)
    source = base.args[0] if base.op == "call_function" and base.args else None
    return isinstance(source, fx.Node) and source.target is call_graph
