"""Write `a + alpha * b` as two ops.

In:    a StepGraph.
Out:   the same graph in which no addition has a factor. Inductor (2.13) forgets it where it joins an addition to a
       matrix product.
Keeps: every value, the signature.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from poptorch.engines.host import Host, in_bodies_too
from poptorch.ir import StepGraph, insert, value_of

aten = torch.ops.aten


@in_bodies_too
def write_out_alpha(graph: StepGraph, host: Host) -> StepGraph:
    """Multiply before adding."""
    if not any(_has_factor(node) for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if _has_factor(node):
            _write_out(ops, node)
    return replace(graph, ops=ops)


def _has_factor(node: fx.Node) -> bool:
    is_sum = node.target is aten.add.Tensor and isinstance(node.args[1], fx.Node)
    return is_sum and bool(node.kwargs.get("alpha", 1) != 1)


def _write_out(ops: fx.Graph, node: fx.Node) -> None:
    first, second = node.args
    assert isinstance(second, fx.Node)
    dtype = value_of(node).dtype
    with ops.inserting_before(node):
        if value_of(second).dtype != dtype:
            second = insert(ops, node, aten._to_copy.default, second, dtype=dtype)
        second = insert(ops, node, aten.mul.Tensor, second, node.kwargs["alpha"])
    node.args, node.kwargs = (first, second), {}
