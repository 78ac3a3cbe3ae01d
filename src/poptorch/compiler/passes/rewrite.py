"""How passes put new ops into a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from poptorch.ir import value_of


def insert(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new op at the graph's insertion point that belongs to the same phase and line as `like`."""
    node = graph.call_function(target, args, kwargs)
    values = [value_of(arg) if isinstance(arg, fx.Node) else arg for arg in args]
    fake_mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), torch.no_grad())
    with fake_mode:
        node.meta = {"val": target(*values, **kwargs), "custom": like.meta.get("custom", {})}
    return node
