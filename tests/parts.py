"""Helpers for tests of graphs that call others: what they compute as a whole, and part by part."""

from __future__ import annotations

import torch

from poptorch.engines.calls import cut_at_calls
from poptorch.ir import OutputRole, StepGraph, call_graph, value_of, verify, with_stride
from poptorch.ir.python import as_function


def calls(graph: StepGraph) -> list[str]:
    """The graphs that are called, in order."""
    return [node.args[0] for node in graph.ops.nodes if node.target is call_graph]


def run(graph: StepGraph, state: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a graph computes, returned values and new values alike."""
    return list(as_function(graph.ops, graph.name, graph.graphs)(*state, *tensors))


def run_in_parts(graph: StepGraph, state: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a graph returns whose parts run one after the other, each of which writes what it changes."""
    cut = cut_at_calls(graph)
    graphs = {**graph.graphs, **(cut.own or {})}
    state = state + [torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype) for kept in cut.kept]
    table: list[torch.Tensor | None] = [*state, *(view.find(state) for view in cut.views), *tensors]
    table += [None] * sum(part.results for part in cut.parts)
    for part in cut.parts:
        operands = [table[place] for place in part.operands]
        assert all(operand is not None for operand in operands), f"{part.graph} is given what was dropped"
        table[part.first : part.first + part.results] = _run_part(graphs[part.graph], operands)  # pyright: ignore
        for place in part.dropped:
            table[place] = None
    kept = [place for place, value in enumerate(table) if value is not None and place >= cut.parts[0].first]
    assert set(kept) == {place for place in cut.returned if place >= cut.parts[0].first}, "a value is never dropped"
    return [table[place] for place in cut.returned]  # pyright: ignore


def _run_part(graph: StepGraph, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """What native code for a part does: it takes and gives the memory layouts that its graph foretells."""
    verify(graph)
    for spec, operand in zip(graph.signature.inputs, operands, strict=True):
        sizes = (operand.numel(),) if graph.takes_any_length and spec.shape else spec.shape
        assert (tuple(operand.shape), operand.dtype) == (sizes, spec.dtype), f"{graph.name}: {spec}"
        assert operand.stride() == spec.stride or 1 in sizes or 0 in sizes, f"{graph.name}: {spec}"
    results = [tensor.clone() for tensor in run(graph, operands, [])]
    positions = {spec.name: index for index, spec in enumerate(graph.signature.inputs)}
    returned: list[torch.Tensor] = []
    for (spec, node), result in zip(graph.outputs, results, strict=True):
        if spec.role is OutputRole.NEW_VALUE:
            operands[positions[spec.name]].copy_(result)
        else:
            returned.append(with_stride(result, tuple(value_of(node).stride())))
    return returned
