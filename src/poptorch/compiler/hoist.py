"""Take computation on weights alone out of an inference step, so that it runs once per set of weights.

Batch norm folding, weight normalisation and the like compute new weights from weights. They move to a program of
their own that runs when weights are taken over; the step gets their results as DERIVED state.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from poptorch.ir import InputSpec, OutputRole, OutputSpec, Role, Signature, StepGraph, value_of
from poptorch.ir.ops import ancestors, is_random, is_view

_FIXED = (Role.PARAMETER, Role.BUFFER)


def hoist_weight_ops(graph: StepGraph) -> tuple[StepGraph, StepGraph | None]:
    """The step without its weight-only ops, and the graph that computes what they computed (None if there is none)."""
    pairs = list(zip(graph.signature.inputs, graph.placeholders, strict=True))
    fixed = {node for spec, node in pairs if spec.role in _FIXED and spec.name not in graph.signature.written}
    weight_only = _weight_only(graph, fixed)
    boundary = [node for node in graph.ops.nodes if node in weight_only and _is_worth_keeping(node, weight_only)]
    if not boundary:
        return graph, None
    derived = {node: InputSpec.of(f"derived:{i}", Role.DERIVED, value_of(node)) for i, node in enumerate(boundary)}
    return _step(graph, pairs, derived), _preparation(graph, pairs, derived)


def _weight_only(graph: StepGraph, fixed: set[fx.Node]) -> set[fx.Node]:
    """The ops that depend on fixed weights and on nothing else that can change."""
    found: set[fx.Node] = set()
    for node in graph.ops.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and not is_random(node) and found.union(fixed).issuperset(inputs):
            found.add(node)
    return found


def _is_worth_keeping(node: fx.Node, weight_only: set[fx.Node]) -> bool:
    """Whether the step needs this value in memory: it computes something, and somebody outside (or a view) uses it."""
    return not is_view(node) and any(user not in weight_only or _leads_out(user, weight_only) for user in node.users)


def _leads_out(node: fx.Node, weight_only: set[fx.Node]) -> bool:
    """Whether a view of a weight-only value is used by the step."""
    return is_view(node) and any(user not in weight_only or _leads_out(user, weight_only) for user in node.users)


def _step(graph: StepGraph, pairs: list[tuple[InputSpec, fx.Node]], derived: dict[fx.Node, InputSpec]) -> StepGraph:
    ops, copies, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[InputSpec]()
    needed = ancestors(graph.results, stop=derived)
    state = [(spec, node) for spec, node in pairs if spec.role is not Role.USER_INPUT and node in needed]
    user = [(spec, node) for spec, node in pairs if spec.role is Role.USER_INPUT]
    for spec, node in (*state, *((spec, node) for node, spec in derived.items()), *user):
        copies[node] = ops.placeholder(f"in{len(inputs)}")
        copies[node].meta = dict(node.meta)
        inputs.append(spec)
    for node in graph.ops.nodes:
        if node.op == "call_function" and node in needed and node not in derived:
            copies[node] = ops.node_copy(node, lambda n: copies[n])
    ops.output(tuple(copies[node] for node in graph.results))
    signature = Signature(tuple(inputs), graph.signature.outputs)
    constants = {name: value for name, value in graph.constants.items() if any(s.name == name for s in inputs)}
    return replace(graph, ops=ops, signature=signature, constants=constants)


def _preparation(
    graph: StepGraph, pairs: list[tuple[InputSpec, fx.Node]], derived: dict[fx.Node, InputSpec]
) -> StepGraph:
    ops, copies, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[InputSpec]()
    needed = ancestors(derived)
    for spec, node in pairs:
        if node in needed:
            copies[node] = ops.placeholder(f"in{len(inputs)}")
            copies[node].meta = dict(node.meta)
            inputs.append(spec)
    for node in graph.ops.nodes:
        if node.op == "call_function" and node in needed:
            copies[node] = ops.node_copy(node, lambda n: copies[n])
    ops.output(tuple(copies[node] for node in derived))
    outputs = tuple(OutputSpec(spec.name, OutputRole.USER_OUTPUT) for spec in derived.values())
    signature = Signature(tuple(inputs), outputs)
    return StepGraph("prepare", ops, signature)
