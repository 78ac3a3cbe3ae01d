"""Take computation on weights alone out of a graph, so that it runs once per set of weights.

Batch norm folding, weight normalisation and the like compute new weights from weights. They move to a graph of their
own that runs when weights are taken over; what is left gets their results as DERIVED inputs.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from poptorch.ir.build import GraphBuilder
from poptorch.ir.control import is_control
from poptorch.ir.graph import Direction, Note, StepGraph, note_of
from poptorch.ir.ops import ancestors, has_effect, is_random, is_view, memory_owner
from poptorch.ir.signature import InputSpec, OutputRole, OutputSpec, Role
from poptorch.ir.values import value_of

aten = torch.ops.aten


def hoist(graph: StepGraph, fixed: Collection[str], name: str = "derived") -> tuple[StepGraph, StepGraph | None]:
    """The graph without the ops that only depend on the inputs in `fixed`, and the graph that computes what they did.

    That is None if there are no such ops. Its results are called after `name`.
    """
    weight_only = _weight_only(graph, {node for spec, node in graph.inputs if spec.name in fixed})
    boundary = [node for node in graph.ops.nodes if node in weight_only and _is_worth_keeping(node, weight_only)]
    if not boundary:
        return graph, None
    derived = {node: InputSpec.of(f"{name}:{i}", Role.DERIVED, value_of(node)) for i, node in enumerate(boundary)}
    return _step(graph, derived), _preparation(graph, derived)


def _weight_only(graph: StepGraph, fixed: set[fx.Node]) -> set[fx.Node]:
    """The ops that depend on fixed weights and on nothing else that can change."""
    known = set(fixed)
    for node in graph.ops.nodes:
        inputs = node.all_input_nodes
        may_differ = is_random(node) or has_effect(node) or is_control(node)
        if node.op == "call_function" and not may_differ and inputs and known.issuperset(inputs):
            known.add(node)
    return known - fixed


def _is_worth_keeping(node: fx.Node, weight_only: set[fx.Node]) -> bool:
    """Whether the step needs this value in memory: it computes something, and somebody outside (or a view) uses it."""
    return not is_view(node) and any(user not in weight_only or _leads_out(user, weight_only) for user in node.users)


def _leads_out(node: fx.Node, weight_only: set[fx.Node]) -> bool:
    """Whether a view of a weight-only value is used by the step."""
    return is_view(node) and any(user not in weight_only or _leads_out(user, weight_only) for user in node.users)


def _step(graph: StepGraph, derived: dict[fx.Node, InputSpec]) -> StepGraph:
    """What is left of the step: it takes the derived values as inputs."""
    builder = GraphBuilder()
    needed = ancestors(graph.results, stop=derived)
    builder.inputs((spec, node) for spec, node in graph.inputs if node in needed or not spec.role.is_state)
    builder.inputs((spec, node) for node, spec in derived.items())
    builder.copy(node for node in graph.ops.nodes if node in needed and node not in derived)
    for spec, node in graph.outputs:
        builder.output(spec, _own_memory(builder, node))
    return builder.build(graph.name, guards=graph.guards, constants=graph.constants, graphs=graph.graphs)


def _own_memory(builder: GraphBuilder, result: fx.Node) -> fx.Node:
    """A result that the caller may change: what is computed once and shown in every call is copied for each."""
    copied = builder.copies[result]
    if memory_owner(copied).op != "placeholder":
        return copied
    return builder.call(note_of(result) or Note(Direction.FORWARD), aten.clone.default, copied)


def _preparation(graph: StepGraph, derived: dict[fx.Node, InputSpec]) -> StepGraph:
    """The graph that computes the derived values."""
    builder = GraphBuilder()
    needed = ancestors(derived)
    builder.inputs((spec, node) for spec, node in graph.inputs if node in needed)
    builder.copy(node for node in graph.ops.nodes if node in needed)
    for node, spec in derived.items():
        builder.output(OutputSpec(spec.name, OutputRole.USER_OUTPUT), builder.copies[node])
    return builder.build("prepare", graphs=graph.graphs)
