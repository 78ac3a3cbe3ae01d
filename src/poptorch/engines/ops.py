"""The ops of a graph in the form in which they are run or compiled."""

from __future__ import annotations

import torch
from torch import fx

from poptorch.ir import OutputRole, StepGraph

aten = torch.ops.aten


def runnable_ops(graph: StepGraph) -> fx.Graph:
    """A copy of the ops with the returned values first and the new values of `written_positions` after them."""
    ops = graph.copy_ops()
    output = ops.output_node()
    results: list[fx.Node] = list(output.args[0])  # pyright: ignore
    pairs = list(zip(graph.signature.outputs, results, strict=True))
    returned = [node for spec, node in pairs if spec.role is not OutputRole.NEW_VALUE]
    written = [node for spec, node in pairs if spec.role is OutputRole.NEW_VALUE]
    output.args = (tuple(returned + written),)
    for node in ops.nodes:  # kernels may lay out their results otherwise than the trace foretold
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    return ops


def written_positions(graph: StepGraph) -> tuple[int, ...]:
    """For each new value that a graph computes, the position of the input that it goes to."""
    positions = {spec.name: index for index, spec in enumerate(graph.signature.inputs)}
    return tuple(positions[spec.name] for spec in graph.signature.outputs if spec.role is OutputRole.NEW_VALUE)


def returned_count(graph: StepGraph) -> int:
    """How many values a graph returns beside the new values of its inputs."""
    return sum(spec.role is not OutputRole.NEW_VALUE for spec in graph.signature.outputs)


def write_in_place(ops: fx.GraphModule, written: tuple[int, ...]) -> fx.GraphModule:
    """End runnable ops with one `copy_` per new value, which native compilers turn into in-place writes."""
    graph = ops.graph
    output = graph.output_node()
    results: list[fx.Node] = list(output.args[0])  # pyright: ignore
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    count = len(results) - len(written)
    with graph.inserting_before(output):
        for position, value in zip(written, results[count:], strict=True):
            target = placeholders[position]
            is_scattered = value.target is aten.index_put.default and list(value.users) == [output]
            new = value.args[0] if is_scattered else value
            if new is not target:
                graph.call_function(aten.copy_.default, (target, new)).meta["val"] = target.meta["val"]
            if is_scattered:  # into the new value itself, not into a copy of it
                graph.call_function(aten.index_put_.default, (target, *value.args[1:])).meta["val"] = target.meta["val"]
    output.args = (tuple(results[:count]),)
    graph.eliminate_dead_code()
    ops.recompile()
    return ops
