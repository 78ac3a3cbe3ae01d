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


def takes_turns(node: fx.Node) -> bool:
    """Whether an op calls a function of the user's, which may do more than compute: it runs when the program says so.

    The last argument of such an op, `after`, holds the last result of each op that has to run before it.
    """
    op = as_op(node.target)
    if op is None or op.namespace != "poptorch":
        return False
    arguments = op._schema.arguments  # pyright: ignore[reportPrivateUsage]
    return bool(arguments) and arguments[-1].name == "after"


_PRINTS = frozenset({"poptorch::print_tensor", "poptorch::print_in_order"})


def has_effect(node: fx.Node) -> bool:
    """Whether an op must run for every micro-batch in which its result is used, once and in its place."""
    op = as_op(node.target)
    return op is not None and (op.name() in _PRINTS or takes_turns(node))


_IDENTITIES = frozenset({"aten::detach", "aten::alias", "poptorch::hint", "poptorch::nop", "poptorch::print_tensor"})


def unchanged_from(node: fx.Node) -> fx.Node:
    """The op that computed a value, looking through those that only pass it on."""
    while (op := as_op(node.target)) is not None and op.name() in _IDENTITIES:
        node = node.all_input_nodes[0]
    return node


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
    """Whether a node's value can differ from run to run: it uses an input of the graph, a random number or the host."""
    return any(node.op == "placeholder" or is_random(node) or takes_turns(node) for node in ancestors([node]))
