"""How passes put new ops into the copy of a graph."""

from __future__ import annotations

from typing import Any

from torch import fx

from poptorch.ir.values import update_value


def insert(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new op at the graph's insertion point that belongs to the same phase and line as `like`."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {"custom": like.meta.get("custom", {})}
    update_value(node)
    return node


def insert_as(graph: fx.Graph, like: fx.Node, value: Any, target: Any, *args: Any) -> fx.Node:
    """The same for an op that cannot tell what it computes: `value` does."""
    node = graph.call_function(target, args)
    node.meta = {"custom": like.meta.get("custom", {}), "val": value}
    return node
