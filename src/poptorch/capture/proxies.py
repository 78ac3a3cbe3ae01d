"""From a tensor that `forward` holds while it is traced to the graph node that computes it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch._functorch._aot_autograd.functional_utils import from_fun
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node that computes a traced tensor, or None for a tensor from outside the graph."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot = get_proxy_slot(from_fun(tensor), mode.tracer, None)  # pyright: ignore[reportArgumentType]
    return None if slot is None else slot.proxy.node


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The given nodes and everything they are computed from."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def depends_on_inputs(node: fx.Node) -> bool:
    """Whether a node's value can differ from run to run: it uses an input of the graph or a random number."""
    return any(node.op == "placeholder" or is_random(node) for node in ancestors([node]))


def is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def base_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory of a node, looking through views."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
