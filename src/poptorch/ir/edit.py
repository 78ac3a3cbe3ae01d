"""How passes put new ops into the copy of a graph, and take out those that compute nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.ir.graph import StepGraph
from poptorch.ir.ops import memory_owner
from poptorch.ir.signature import OutputRole
from poptorch.ir.values import update_value


def insert(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new op at the graph's insertion point that belongs to the same direction and line as `like`."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {"custom": like.meta.get("custom", {})}
    update_value(node)
    return node


def insert_as(graph: fx.Graph, like: fx.Node, value: Any, target: Any, *args: Any) -> fx.Node:
    """The same for an op that cannot tell what it computes: `value` does."""
    node = graph.call_function(target, args)
    node.meta = {"custom": like.meta.get("custom", {}), "val": value}
    return node


def without_identities(graph: StepGraph, targets: Collection[Any]) -> StepGraph:
    """The graph without the ops that call one of `targets`, each of which returns a copy of its first operand.

    A result keeps memory of its own: what showed an input or a new value through such an op becomes a real copy.
    """
    if graph.graphs:
        graph = replace(graph, graphs={name: without_identities(g, targets) for name, g in graph.graphs.items()})
    if not any(node.target in targets for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    output = ops.output_node()
    shown: list[fx.Node] = [memory_owner(node) for node in output.args[0]]  # pyright: ignore
    for node in list(ops.nodes):
        if node.target in targets and node not in shown:
            _bypass(ops, node)
    new = [spec.role is OutputRole.NEW_VALUE for spec in graph.signature.outputs]
    written = {owner for owner, is_new in zip(shown, new, strict=True) if is_new}
    for node, is_new in zip(shown, new, strict=True):
        if node.target not in targets or not node.users:
            continue
        owner = memory_owner(node.all_input_nodes[0])
        if owner.op == "placeholder" or is_new or owner in written:
            node.target, node.args, node.kwargs = torch.ops.aten.clone.default, node.args[:1], {}
        else:
            _bypass(ops, node)
    return replace(graph, ops=ops)


def _bypass(ops: fx.Graph, node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    ops.erase_node(node)
