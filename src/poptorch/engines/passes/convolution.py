"""Compute the gradient of a convolution's bias as the plain sum it is.

In:    a training StepGraph.
Out:   the same graph in which no convolution_backward computes a bias gradient; a sum over the incoming gradient does.
       PyTorch's kernel walks over the whole gradient a second time for it, several times slower than the sum.
Keeps: every value up to rounding, the signature.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.engines.host import Host
from poptorch.ir import StepGraph, insert, value_of

aten = torch.ops.aten
_BACKWARD = aten.convolution_backward.default
_POOL_BACKWARD = aten.max_pool2d_with_indices_backward.default
_BIAS = 2  # which of the three gradients


def separate_bias_gradients(graph: StepGraph, host: Host) -> StepGraph:
    """Sum up the gradient of each convolution's bias outside the convolution's backward pass."""
    if not any(node.target is _BACKWARD for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if node.target is operator.getitem and node.args[0].target is _BACKWARD and node.args[1] == _BIAS:
            _separate(ops, node)
    ops.eliminate_dead_code()
    return replace(graph, ops=ops)


def _separate(graph: fx.Graph, bias_gradient: fx.Node) -> None:
    backward: Any = bias_gradient.args[0]
    incoming, mask = _before_pooling(backward.args[0]), list(backward.args[-1])
    dims = [dim for dim in range(value_of(incoming).dim()) if dim != 1]
    with graph.inserting_after(incoming):
        total = insert(graph, backward, aten.sum.dim_IntList, incoming, dims)
    bias_gradient.replace_all_uses_with(total)
    graph.erase_node(bias_gradient)
    mask[_BIAS] = False
    backward.args = (*backward.args[:-1], mask)
    gradients = list(value_of(backward))
    gradients[_BIAS] = None
    backward.meta = {**backward.meta, "val": tuple(gradients)}


def _before_pooling(gradient: fx.Node) -> fx.Node:
    """The gradient that a max pooling only spreads out: it has the same sum in a fraction of the elements."""
    while gradient.target is _POOL_BACKWARD:
        gradient = gradient.args[0]  # pyright: ignore[reportAssignmentType]
    return gradient
