"""Questions about single ops of a graph, and walks along its edges."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from poptorch.ir.control import draws_inside

Op = torch._ops.OpOverload  # pyright: ignore[reportPrivateUsage]


def as_op(target: object) -> Op[..., Any] | None:
    """The ATen op that a node calls, or None if it calls something else."""
    return target if isinstance(target, Op) else None  # pyright: ignore[reportUnknownVariableType]


_DROPOUT = 3  # the position of the probability


def is_random(node: fx.Node) -> bool:
    """Whether an op draws random numbers, or runs a graph that does; attention draws only to drop something out."""
    if draws_inside(node):
        return True
    op = as_op(node.target)
    if op is None or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    is_attention = op is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return not is_attention or node.args[_DROPOUT : _DROPOUT + 1] not in ((), (0,), (0.0,))


def is_view(node: fx.Node) -> bool:
    """Whether the result of an op shares memory with its first input."""
    op = as_op(node.target)
    return op is not None and op.is_view and bool(node.all_input_nodes)


def memory_owner(node: fx.Node) -> fx.Node:
    """The node whose memory a node shows, looking through views."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def ancestors(nodes: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The given nodes and everything they are computed from, not looking behind the nodes in `stop`."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            if node not in stop:
                pending.extend(node.all_input_nodes)
    return found


def depends_on_inputs(node: fx.Node) -> bool:
    """Whether a node's value can differ from run to run: it uses an input of the graph or a random number."""
    return any(node.op == "placeholder" or is_random(node) for node in ancestors([node]))
