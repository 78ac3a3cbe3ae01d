"""Put what a Python function computes into a graph, op by op."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from poptorch.ir.values import fake_mode, value_of


def inline(graph: fx.Graph, like: fx.Node, function: Callable[..., Any], *args: Any) -> Any:
    """The ops of a function of tensors at the graph's insertion point; nodes take the place of tensors.

    New ops belong to the same direction and line as `like`. The result is nested as that of the function.
    """
    return inline_as(graph, like.meta.get("custom", {}), function, *args)


def inline_as(graph: fx.Graph, annotated: Mapping[str, Any], function: Callable[..., Any], *args: Any) -> Any:
    """The same for ops that are annotated in this way."""
    nodes: list[fx.Node] = []
    fx.map_arg(args, nodes.append)
    traced, structure = _trace_once(function, args, nodes)
    placeholders = [node for node in traced.nodes if node.op == "placeholder"]
    copies = dict(zip(placeholders, nodes, strict=True))
    for node in traced.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {"val": node.meta["val"], "custom": dict(annotated)}
    flat: Any = traced.output_node().args[0]
    return pytree.tree_unflatten([copies[node] for node in flat], structure)


_Traced = tuple[fx.Graph, pytree.TreeSpec]
_MOST_TRACED = 64
_TRACED: OrderedDict[tuple[Callable[..., Any], str], _Traced] = OrderedDict()  # the last ones


def _trace_once(function: Callable[..., Any], args: tuple[Any, ...], nodes: list[fx.Node]) -> _Traced:
    """The ops of a function, which are kept, unless it is a new one in every call and holds what it was made for."""
    if getattr(function, "__closure__", None) is not None:
        return _trace(function, args, nodes)
    key = function, repr(fx.map_arg(args, _layout))  # pyright: ignore
    if key not in _TRACED:
        while len(_TRACED) >= _MOST_TRACED:
            _TRACED.popitem(last=False)
        _TRACED[key] = _trace(function, args, nodes)
    return _TRACED[key]


def _layout(node: fx.Node) -> tuple[Any, ...]:
    """All that the ops of a function can depend on of an argument."""
    value = value_of(node)
    return value.dtype, tuple(value.shape), value.stride()


def _trace(function: Callable[..., Any], args: tuple[Any, ...], nodes: list[fx.Node]) -> _Traced:
    """The ops of a function of tensors like these, and how its result is nested.

    Each tensor is one of its own, also where a node is given twice, or two nodes are described by one tensor: a tensor
    that came twice would be taken for its last place in all of them, and that would be kept for others.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a while to import, so only when it is used

    results: list[Any] = []

    def compute(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = iter(tensors)
        results.append(function(*fx.map_arg(args, lambda node: next(given))))  # pyright: ignore
        return pytree.tree_leaves(results[0])

    with fake_mode():
        traced = make_fx(compute)(*map(_like, nodes))
    return traced.graph, pytree.tree_structure(results[0])


def _like(node: fx.Node) -> torch.Tensor:
    value = value_of(node)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
