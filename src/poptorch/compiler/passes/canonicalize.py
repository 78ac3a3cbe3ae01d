"""Bring a captured graph into its plain form.

In:    a StepGraph as it was traced.
Out:   the same graph without ops that only change bookkeeping, with int64 labels in every loss, and with no result
       that shares memory with an input.
Keeps: every value, the signature.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.ir import OutputRole, StepGraph, insert, value_of
from poptorch.ir.ops import memory_owner
from poptorch.options import Settings

aten = torch.ops.aten
_WRITTEN = (OutputRole.NEW_VALUE, OutputRole.VALUE_BEFORE_UPDATE)
_IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
_POSITION_OF_LABELS: dict[Any, int] = {
    aten.nll_loss_forward.default: 1,
    aten.nll_loss2d_forward.default: 1,
    aten.nll_loss_backward.default: 2,
    aten.nll_loss2d_backward.default: 2,
}


def canonicalize(graph: StepGraph, settings: Settings) -> StepGraph:
    """Remove identities, and give every new value memory of its own."""
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            ops.erase_node(node)
        elif node.target in _POSITION_OF_LABELS:
            _use_long_labels(ops, node)
    results = _separate(ops, graph)
    ops.output_node().args = (tuple(results),)
    ops.eliminate_dead_code()
    inner = {name: canonicalize(each, settings) for name, each in graph.graphs.items()}
    return replace(graph, ops=ops, graphs=inner)


def _use_long_labels(ops: fx.Graph, loss: fx.Node) -> None:
    """Engines differ in which other types they take: PyTorch's kernels uint8, Inductor's code int32."""
    labels: Any = loss.args[_POSITION_OF_LABELS[loss.target]]
    if value_of(labels).dtype != torch.int64:
        with ops.inserting_before(loss):
            loss.replace_input_with(labels, insert(ops, loss, aten._to_copy.default, labels, dtype=torch.int64))


def _separate(ops: fx.Graph, graph: StepGraph) -> list[fx.Node]:
    """Copy each new value that is only a view of an input: writing one input must not change what another gets."""
    output = ops.output_node()
    results: list[fx.Node] = []
    with ops.inserting_before(output):
        nodes: list[fx.Node] = list(output.args[0])  # pyright: ignore
        for spec, node in zip(graph.signature.outputs, nodes, strict=True):
            if spec.role in _WRITTEN and memory_owner(node).op == "placeholder":
                copied = ops.call_function(aten.clone.default, (node,))
                copied.meta = dict(node.meta)
                copied.meta["val"] = value_of(node)
                node = copied
            results.append(node)
    return results
