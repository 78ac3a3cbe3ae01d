"""Write batch normalisation out as sums and products, so that each micro-batch can have statistics of its own.

In:    a StepGraph.
Out:   the same graph in which what normalises by the statistics of the batch is written out, and running statistics
       are read by nothing but the arithmetic that moves them.
Keeps: every value up to rounding, the signature.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.compiler.wide.values import NARROW_FLOATS
from poptorch.ir import StepGraph, insert, value_of

aten = torch.ops.aten
_FORWARD = aten._native_batch_norm_legit_functional.default
_WITHOUT_STATISTICS = aten._native_batch_norm_legit.no_stats
_BACKWARD = aten.native_batch_norm_backward.default


def write_out_norms(graph: StepGraph) -> StepGraph:
    """Replace batch norms that use the statistics of the batch."""
    if not any(_is_due(node) for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if _is_due(node):
            with ops.inserting_before(node):
                results = (_backward if node.target is _BACKWARD else _forward)(_Insert(ops, node), node)
            for user in list(node.users):
                result: Any = results[user.args[1]]  # pyright: ignore
                user.replace_all_uses_with(result)
    ops.eliminate_dead_code()
    return replace(graph, ops=ops)


def normalises_images(graph: StepGraph) -> bool:
    """Whether a norm that has to be written out works on more than rows of features; engines prefer it whole."""
    return any(_is_due(node) and value_of(_activation(node)).dim() > 2 for node in graph.ops.nodes)


def _activation(norm: fx.Node) -> fx.Node:
    x = norm.args[1 if norm.target is _BACKWARD else 0]
    assert isinstance(x, fx.Node)
    return x


def _is_due(node: fx.Node) -> bool:
    """Whether a node is such a norm, and only its single results are used."""
    positions: dict[Any, int] = {_FORWARD: 5, _WITHOUT_STATISTICS: 3, _BACKWARD: 7}
    if node.target not in positions or not node.args[positions[node.target]]:
        return False
    return all(user.target is operator.getitem for user in node.users)


class _Insert:
    """New ops before a norm."""

    def __init__(self, ops: fx.Graph, like: fx.Node) -> None:
        self._ops, self._like = ops, like

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert(self._ops, self._like, target, *args, **kwargs)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if value_of(node).dtype == dtype else self(aten._to_copy.default, node, dtype=dtype)

    def wide(self, node: fx.Node) -> fx.Node:
        """In a type that sums fit into."""
        return self.cast(node, torch.float32) if value_of(node).dtype in NARROW_FLOATS else node

    def by_channel(self, node: fx.Node, rank: int) -> fx.Node:
        """A vector of channels that broadcasts against activations."""
        return self(aten.view.default, self.wide(node), [1, -1, *[1] * (rank - 2)])


def _sizes(x: fx.Node) -> tuple[int, list[int], int]:
    """The rank, the dimensions that statistics go over, and how many elements these have."""
    shape = value_of(x).shape
    dims = [dim for dim in range(len(shape)) if dim != 1]
    return len(shape), dims, value_of(x).numel() // shape[1]


def _forward(call: _Insert, norm: fx.Node) -> Sequence[fx.Node | None]:
    x, weight, bias, *others = norm.args
    assert isinstance(x, fx.Node)
    statistics: Any = others[:2] if norm.target is _FORWARD else (None, None)
    momentum, epsilon = norm.args[-2:]
    rank, dims, count = _sizes(x)
    both = call(aten.var_mean.correction, call.wide(x), dims, correction=0, keepdim=True)
    variance, mean = (call(operator.getitem, both, index) for index in range(2))
    scale = call(aten.rsqrt.default, call(aten.add.Scalar, variance, epsilon))
    y = call(aten.mul.Tensor, call(aten.sub.Tensor, call.wide(x), mean), scale)
    if isinstance(weight, fx.Node):
        y = call(aten.mul.Tensor, y, call.by_channel(weight, rank))
    if isinstance(bias, fx.Node):
        y = call(aten.add.Tensor, y, call.by_channel(bias, rank))
    saved = [call(aten.view.default, each, [-1]) for each in (mean, scale)]
    unbiased = call(aten.mul.Scalar, call(aten.view.default, variance, [-1]), count / max(count - 1, 1))
    moved = [
        old if old is None else _moved(call, old, new, momentum)
        for old, new in zip(statistics, (saved[0], unbiased), strict=True)
    ]
    return [call.cast(y, value_of(x).dtype), *saved, *moved]


def _moved(call: _Insert, old: fx.Node, new: fx.Node, momentum: Any) -> fx.Node:
    """A running statistic, moved towards that of a batch."""
    kept = call(aten.mul.Scalar, call.wide(old), 1.0 - momentum)
    return call.cast(call(aten.add.Tensor, kept, call(aten.mul.Scalar, new, momentum)), value_of(old).dtype)


def _backward(call: _Insert, norm: fx.Node) -> Sequence[fx.Node]:
    gradient, x, weight, _, _, mean, scale = norm.args[:7]
    assert isinstance(gradient, fx.Node) and isinstance(x, fx.Node)
    assert isinstance(mean, fx.Node) and isinstance(scale, fx.Node)
    rank, dims, count = _sizes(x)
    g, scaling = call.wide(gradient), call.by_channel(scale, rank)
    away = call(aten.mul.Tensor, call(aten.sub.Tensor, call.wide(x), call.by_channel(mean, rank)), scaling)
    of_bias = call(aten.sum.dim_IntList, g, dims)
    of_weight = call(aten.sum.dim_IntList, call(aten.mul.Tensor, g, away), dims)
    shared = call(aten.mul.Tensor, away, call.by_channel(of_weight, rank))
    shared = call(aten.add.Tensor, shared, call.by_channel(of_bias, rank))
    of_x = call(aten.mul.Tensor, call(aten.sub.Tensor, g, call(aten.mul.Scalar, shared, 1.0 / count)), scaling)
    dtype = torch.float32
    if isinstance(weight, fx.Node):
        of_x = call(aten.mul.Tensor, of_x, call.by_channel(weight, rank))
        dtype = value_of(weight).dtype
    return [call.cast(of_x, value_of(x).dtype), call.cast(of_weight, dtype), call.cast(of_bias, dtype)]
