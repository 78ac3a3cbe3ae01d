"""Draw random numbers before native code runs, which cannot take a generator.

In:    a StepGraph.
Out:   the same graph in which draws that need no data are inputs, and the graph `draws` that makes them. Other draws
       call back into Python.
Keeps: every value; which numbers are drawn, in the order of the program.
"""

from __future__ import annotations

import operator
from collections.abc import Container
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, fx

from poptorch.engines.control_flow import all_nodes
from poptorch.engines.draws import draws
from poptorch.engines.host import Host
from poptorch.engines.native_draws import call_back, operand_order, prepared
from poptorch.ir import (
    Direction,
    GraphBuilder,
    InputSpec,
    Note,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    choose_graph,
    is_control,
    note_of,
    runs_of,
    value_of,
)
from poptorch.ir.ops import as_op, memory_owner

aten = torch.ops.aten
DRAWS = "draws"
_OF_PYTORCH = ("aten", "prims", "mkldnn")


def draw_ahead(graph: StepGraph, host: Host) -> StepGraph:
    """Make draws that need no data inputs."""
    if not any(draws(node) for node in graph.ops.nodes):
        return graph
    ahead = _ahead(graph)
    specs = {node: InputSpec.of(f"drawn:{i}", Role.DRAWN, value_of(node)) for i, node in enumerate(ahead)}
    builder = GraphBuilder()
    builder.inputs(graph.inputs)
    builder.inputs((spec, node) for node, spec in specs.items())
    bodies = _call_back(builder, graph, specs, {})
    drawn = {builder.copies[node] for node in ahead}
    for spec, node in graph.outputs:
        result = builder.copies[node]
        if memory_owner(result) in drawn:  # the caller keeps it, and the memory is used again
            result = builder.call(_note(node), aten.clone.default, result)
        builder.output(spec, result)
    graphs = {**graph.graphs, **bodies}
    changed = builder.build(graph.name, guards=graph.guards, constants=graph.constants, graphs=graphs)
    return replace(changed, graphs={**graphs, DRAWS: _drawing(specs)}) if specs else changed


def _ahead(graph: StepGraph) -> list[fx.Node]:
    """The draws that need no data.

    Each generator is asked in the order of the program: after a draw that depends on data, all others have to wait.
    """
    found: list[fx.Node] = []
    waiting: set[Generator | None] = set()
    for node in graph.ops.nodes:
        if is_control(node):
            waiting |= _generators(graph, node)
        elif draws(node):
            own: Any = node.kwargs.get("generator")
            if own in waiting or prepared(node) is None:
                waiting.add(own)
            else:
                found.append(node)
    return found


def _generators(graph: StepGraph, node: fx.Node) -> set[Generator | None]:
    """The generators that bodies of a node draw from."""
    found: set[Generator | None] = set()
    for run in runs_of(node):
        for inner in all_nodes(graph.graphs[run.graph]):
            if draws(inner) and not is_control(inner):
                found.add(inner.kwargs.get("generator"))  # pyright: ignore[reportArgumentType]
    return found


_Last = dict[Generator | None, fx.Node]  # the last draw from each generator that code calls back for


def _call_back(builder: GraphBuilder, graph: StepGraph, ahead: Container[fx.Node], last: _Last) -> dict[str, StepGraph]:
    """Copy the ops of a graph but those that are drawn ahead; other draws go through Python, one after the other.

    Gives the bodies of loops and branches that have changed.
    """
    bodies: dict[str, StepGraph] = {}
    for node in graph.ops.nodes:
        if node.op != "call_function" or node in ahead:
            continue
        if not draws(node):
            builder.copy([node])
        elif is_control(node):
            bodies.update(_call_back_inside(builder, graph, node, last))
        else:
            own: Any = node.kwargs.get("generator")
            last[own] = _add_call_back(builder, node, last.get(own))
    return bodies


def _call_back_inside(builder: GraphBuilder, graph: StepGraph, node: fx.Node, last: _Last) -> dict[str, StepGraph]:
    """Copy a node that runs bodies; these take earlier draws as operands, to come after them."""
    own = _generators(graph, node)
    earlier = {generator: drawn for generator, drawn in last.items() if generator in own}
    bodies = {run.graph: _drawing_body(graph.graphs[run.graph], earlier) for run in runs_of(node)}
    builder.copy([node])
    copied = builder.copies[node]
    arguments: list[Any] = list(copied.args)
    for position in (2, 4) if node.target is choose_graph else (3,):
        arguments[position] = [*arguments[position], *earlier.values()]
    copied.args, copied.kwargs = tuple(arguments), {}  # what calls back is an op like others
    if value_of(node):
        first = builder.call_as(_note(node), value_of(node)[0], operator.getitem, copied, 0)
        last.update(dict.fromkeys(own, first))
    return bodies


def _drawing_body(graph: StepGraph, earlier: _Last) -> StepGraph:
    builder = GraphBuilder()
    builder.inputs(graph.inputs)
    last: _Last = {}
    for index, (generator, drawn) in enumerate(earlier.items()):
        last[generator] = builder.input(InputSpec.of(f"earlier{index}", Role.USER_INPUT, value_of(drawn)))
    if graph.placeholders:  # so that no draw is taken for a constant
        operand = builder.copies[graph.placeholders[0]]
        for generator in (node.kwargs.get("generator") for node in graph.ops.nodes if draws(node)):
            last.setdefault(generator, operand)  # pyright: ignore[reportArgumentType]
    bodies = _call_back(builder, graph, (), last)
    for spec, result in graph.outputs:
        builder.output(spec, builder.copies[result])
    return builder.build(graph.name, graphs={**graph.graphs, **bodies})


def _add_call_back(builder: GraphBuilder, node: fx.Node, earlier: fx.Node | None) -> fx.Node:
    """Let a node draw through Python; gives a tensor that it draws, for the next one to wait for."""
    inputs: dict[fx.Node, fx.Node] = dict(builder.copies)
    if earlier is not None:
        inputs[earlier] = earlier
    target, arguments = call_back(node, earlier)
    here = fx.map_arg(arguments, inputs.__getitem__)
    drawn = builder.copies[node] = builder.call_as(_note(node), value_of(node), target, *here)
    is_tensor = isinstance(value_of(node), torch.Tensor)
    return drawn if is_tensor else builder.call(_note(node), operator.getitem, drawn, 0)


def _drawing(specs: dict[fx.Node, InputSpec]) -> StepGraph:
    """The graph that draws; of an operand that is overwritten only size and order count."""
    builder = GraphBuilder()
    for node, spec in specs.items():
        arguments = list(node.args)
        if arguments and isinstance(arguments[0], fx.Node):
            like = (list(spec.shape), list(operand_order(node) or spec.stride))
            arguments[0] = builder.call(_note(node), aten.empty_strided.default, *like, dtype=spec.dtype)
        drawn = builder.call_as(_note(node), value_of(node), node.target, *arguments, **node.kwargs)  # pyright: ignore
        builder.output(OutputSpec(spec.name, OutputRole.USER_OUTPUT), drawn)
    return builder.build(DRAWS)


def _note(node: fx.Node) -> Note:
    return note_of(node) or Note(Direction.FORWARD)


def calls_python(graph: StepGraph) -> bool:
    """Whether code for a graph may run Python on the way: ops of ours or of the user, and draws that need data."""
    return any(node.op == "call_function" and not _is_native(node) for node in all_nodes(graph))


def _is_native(node: fx.Node) -> bool:
    op = as_op(node.target)
    if op is None:
        return node.target is operator.getitem or bool(runs_of(node))
    return op.namespace in _OF_PYTORCH
