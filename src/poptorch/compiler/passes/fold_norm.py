"""Fold batch normalisation with fixed statistics into the convolution before it.

In:    an inference StepGraph.
Out:   the same graph in which a convolution followed only by an evaluation-mode batch norm has scaled weights and a
       shifted bias instead; the arithmetic on weights is hoisted later, so it runs once and not for every batch.
       It is float32 also for 16-bit weights, whose scaled form may be too large for 16 bits.
Keeps: every value up to rounding, the signature.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.ir import StepGraph, insert, value_of
from poptorch.options import Settings

aten = torch.ops.aten
_NORM = aten._native_batch_norm_legit_no_training.default


def fold_batch_norm(graph: StepGraph, settings: Settings) -> StepGraph:
    """Scale the convolution's weights instead of its results."""
    if settings.is_training or not any(node.target is _NORM for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if node.target is _NORM and _can_fold(node):
            _fold(ops, node)
    ops.eliminate_dead_code()
    return replace(graph, ops=ops)


def _can_fold(norm: fx.Node) -> bool:
    convolution: Any = norm.args[0]
    if convolution.target is not aten.convolution.default or len(convolution.users) != 1:
        return False
    is_transposed = convolution.args[6]
    state = [arg for arg in (*convolution.args[1:3], *norm.args[1:5]) if arg is not None]
    only_first_result = all(user.target is operator.getitem and user.args[1] == 0 for user in norm.users)
    return not is_transposed and only_first_result and all(_is_unbatched(arg) for arg in state)


def _is_unbatched(node: Any) -> bool:
    """Whether a value comes from state alone; only inputs themselves are looked at, which is what layers use."""
    return isinstance(node, fx.Node) and _input(node).op == "placeholder" and value_of(node).dtype.is_floating_point


def _input(node: Any) -> Any:
    """What was cast, if a value is a cast of something."""
    return node.args[0] if isinstance(node, fx.Node) and node.target is aten._to_copy.default else node


def _fold(graph: fx.Graph, norm: fx.Node) -> None:
    convolution: Any = norm.args[0]

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert(graph, convolution, target, *args, **kwargs)

    def wide(state: Any) -> Any:
        is_narrow = state is not None and value_of(state).dtype.itemsize < torch.float32.itemsize
        return call(aten._to_copy.default, state, dtype=torch.float32) if is_narrow else state

    with graph.inserting_before(convolution):
        state = (*convolution.args[1:3], *norm.args[1:5])
        weight, bias, gamma, beta, mean, variance = [wide(_input(each)) for each in state]
        epsilon = norm.args[6]
        scale = call(aten.rsqrt.default, call(aten.add.Scalar, variance, epsilon))
        if gamma is not None:
            scale = call(aten.mul.Tensor, scale, gamma)
        shape = [-1] + [1] * (value_of(weight).dim() - 1)
        scaled = call(aten.mul.Tensor, weight, call(aten.view.default, scale, shape))
        shifted = call(aten.neg.default, mean) if bias is None else call(aten.sub.Tensor, bias, mean)
        shift = call(aten.mul.Tensor, shifted, scale)
        if beta is not None:
            shift = call(aten.add.Tensor, shift, beta)
    convolution.args = (convolution.args[0], scaled, shift, *convolution.args[3:])
    for user in list(norm.users):
        user.replace_all_uses_with(convolution)
