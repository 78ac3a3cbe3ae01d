"""How passes put new ops into a graph."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import fx

from poptorch.ir import value_of


def insert(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new op at the graph's insertion point that belongs to the same phase and line as `like`."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {"custom": like.meta.get("custom", {})}
    update_value(node)
    return node


def update_value(node: fx.Node) -> None:
    """Note what an op computes for the operands that it has now."""
    args: Any = fx.map_arg(node.args, value_of)
    kwargs: Any = fx.map_arg(node.kwargs, value_of)
    fake_mode = next(
        (v.fake_mode for v in map(value_of, node.all_input_nodes) if hasattr(v, "fake_mode")), nullcontext()
    )
    target: Any = node.target
    with fake_mode:
        node.meta = {**node.meta, "val": target(*args, **kwargs)}
