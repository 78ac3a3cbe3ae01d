"""Apply ReLU after a max pooling instead of before it.

In:    a StepGraph.
Out:   the same graph in which a ReLU whose result only goes into a max pooling follows the pooling; it then works on a
       fraction of the elements, forward and backward, and its large result need not be kept.
Keeps: every value exactly, the signature. The maximum of a window is the same before and after clamping, and where the
       whole window is negative, so that ReLU would have hidden which element was chosen, no gradient flows.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from poptorch.engines.host import Host
from poptorch.ir import StepGraph, insert

aten = torch.ops.aten
_RELU, _RELU_BACKWARD = aten.relu.default, aten.threshold_backward.default
_POOL, _POOL_BACKWARD = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default


@dataclass(frozen=True)
class _Pooled:
    """A ReLU followed by a max pooling, and their backward passes if the graph trains."""

    relu: fx.Node
    pool: fx.Node
    maximum: fx.Node
    pool_backward: fx.Node | None
    relu_backward: fx.Node | None


def pool_before_relu(graph: StepGraph, host: Host) -> StepGraph:
    """Exchange ReLU and max pooling where nothing else looks at what lies between them."""
    if not any(node.target is _POOL for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if node.target is _POOL and (pooled := _match(node)) is not None:
            _exchange(ops, pooled)
    return replace(graph, ops=ops)


def _match(pool: fx.Node) -> _Pooled | None:
    relu: Any = pool.args[0]
    if relu.target is not _RELU:
        return None
    results = {user.args[1]: user for user in pool.users if user.target is operator.getitem}
    maximum, indices = results.get(0), results.get(1)
    backward = [] if indices is None else list(indices.users)
    masks = [user for node in backward for user in node.users]
    if maximum is None or len(backward) > 1 or len(masks) != len(backward):
        return None
    if any(node.target is not _POOL_BACKWARD for node in backward) or any(not _masks(mask, relu) for mask in masks):
        return None
    if set(relu.users) != {pool, *backward, *masks}:
        return None
    return _Pooled(relu, pool, maximum, *(backward or [None]), *(masks or [None]))


def _masks(node: fx.Node, relu: fx.Node) -> bool:
    """Whether a node is the backward pass of this ReLU."""
    return node.target is _RELU_BACKWARD and node.args[1:] == (relu, 0)


def _exchange(graph: fx.Graph, pooled: _Pooled) -> None:
    relu, pool, maximum = pooled.relu, pooled.pool, pooled.maximum
    pool.replace_input_with(relu, relu.args[0])  # pyright: ignore[reportArgumentType]
    with graph.inserting_after(maximum):
        clamped = insert(graph, relu, _RELU, maximum)
    maximum.replace_all_uses_with(clamped, delete_user_cb=lambda user: user is not clamped)
    if pooled.pool_backward is not None and pooled.relu_backward is not None:
        backward, mask = pooled.pool_backward, pooled.relu_backward
        with graph.inserting_before(backward):
            masked = insert(graph, mask, _RELU_BACKWARD, backward.args[0], clamped, 0)
        backward.args = (masked, relu.args[0], *backward.args[2:])
        mask.replace_all_uses_with(backward)
        graph.erase_node(mask)
    graph.erase_node(relu)
