"""Draw random numbers before native code runs, which cannot take a generator.

In:    a StepGraph.
Out:   the same graph in which draws that need no data are inputs, and the graph `draws` that makes them. Other draws
       call back into Python.
Keeps: every value; which numbers are drawn, in the order of the program.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, fx

from poptorch.engines.draws import draws
from poptorch.engines.host import Host
from poptorch.engines.native_draws import call_back, prepared
from poptorch.ir import GraphBuilder, InputSpec, Note, OutputRole, OutputSpec, Phase, Role, StepGraph, note_of, value_of
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
    last: dict[Generator | None, fx.Node] = {}  # the last draw from each generator that code calls back for
    for node in graph.ops.nodes:
        if node.op != "call_function" or node in specs:
            continue
        if draws(node):
            own: Any = node.kwargs.get("generator")
            last[own] = _add_call_back(builder, node, last.get(own))
        else:
            builder.copy([node])
    drawn = {builder.copies[node] for node in ahead}
    for spec, node in graph.outputs:
        result = builder.copies[node]
        if memory_owner(result) in drawn:  # the caller keeps it, and the memory is used again
            result = builder.call(_note(node), aten.clone.default, result)
        builder.output(spec, result)
    changed = builder.build(graph.name, guards=graph.guards, constants=graph.constants, graphs=graph.graphs)
    return replace(changed, graphs={**graph.graphs, DRAWS: _drawing(specs)}) if specs else changed


def _ahead(graph: StepGraph) -> list[fx.Node]:
    """The draws that need no data.

    Each generator is asked in the order of the program: after a draw that depends on data, all others have to wait.
    """
    found: list[fx.Node] = []
    waiting: set[Generator | None] = set()
    for node in graph.ops.nodes:
        if draws(node):
            own: Any = node.kwargs.get("generator")
            if own in waiting or prepared(node) is None:
                waiting.add(own)
            else:
                found.append(node)
    return found


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
    """The graph that draws; of an operand that is overwritten only the size counts."""
    builder = GraphBuilder()
    for node, spec in specs.items():
        arguments = list(node.args)
        if arguments and isinstance(arguments[0], fx.Node):
            like = (list(spec.shape), list(spec.stride))
            arguments[0] = builder.call(_note(node), aten.empty_strided.default, *like, dtype=spec.dtype)
        drawn = builder.call_as(_note(node), value_of(node), node.target, *arguments, **node.kwargs)  # pyright: ignore
        builder.output(OutputSpec(spec.name, OutputRole.USER_OUTPUT), drawn)
    return builder.build(DRAWS)


def _note(node: fx.Node) -> Note:
    return note_of(node) or Note(Phase.FORWARD)


def calls_python(graph: StepGraph) -> bool:
    """Whether code for a graph may run Python on the way: ops of ours or of the user, and draws that need data."""
    return any(node.op == "call_function" and not _is_native(node) for node in graph.ops.nodes)


def _is_native(node: fx.Node) -> bool:
    op = as_op(node.target)
    return node.target is operator.getitem if op is None else op.namespace in _OF_PYTORCH
