"""Let random numbers be drawn at the start of a micro-batch, in the order in which `forward` draws them.

Sections of a pipeline work on different micro-batches at the same time. If each drew for itself, the order of draws,
and so the numbers, would depend on how many sections there are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.ir import Direction, Note, Placement, StepGraph, annotation, update_value, value_of
from poptorch.ir.ops import is_random

aten = torch.ops.aten

# Ops of which only the size and layout of the first operand matters.
_LIKE: frozenset[Any] = frozenset(
    {
        aten.bernoulli.p,
        aten.uniform.default,
        aten.normal_functional.default,
        aten.exponential.default,
        aten.geometric.default,
        aten.cauchy.default,
        aten.log_normal.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.randint_like.default,
        aten.randint_like.low_dtype,
    }
)
_START = Note(Direction.FORWARD, placement=Placement())


def draw_first(graph: StepGraph) -> StepGraph:
    """The same graph, in which draws that need nothing but a size do not wait for what has that size."""
    if not any(is_random(node) for node in graph.ops.nodes if node.op == "call_function"):
        return graph
    ops = graph.copy_ops()
    first = next(node for node in ops.nodes if node.op != "placeholder")
    for node in list(ops.nodes):
        if node.target in _LIKE and node.all_input_nodes == [node.args[0]]:
            with ops.inserting_before(first):
                node.replace_input_with(node.args[0], _empty(ops, node.args[0]))
    ops.eliminate_dead_code()
    return replace(graph, ops=ops)


def _empty(ops: fx.Graph, like: Any) -> fx.Node:
    """Memory of the same size and layout."""
    value: torch.Tensor = value_of(like)
    node = ops.call_function(
        aten.empty_strided.default, (list(value.shape), list(value.stride())), {"dtype": value.dtype}
    )
    node.meta = {"custom": annotation(_START)}
    update_value(node)
    return node
