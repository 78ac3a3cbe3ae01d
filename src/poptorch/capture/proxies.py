"""From a tensor that `forward` holds while it is traced to the graph node that computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from poptorch.capture.private import (
    FakeTensor,
    FunctionalTensor,
    from_fun,
    get_proxy_mode,
    get_proxy_slot,
    is_functional_tensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
)

_IDENTITIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def is_outside(value: object) -> bool:
    """Whether a value is a tensor that no trace has made."""
    if not isinstance(value, torch.Tensor) or isinstance(value, (FunctionalTensor, FakeTensor)):
        return False
    is_wrapped = is_functorch_wrapped_tensor(value) or is_legacy_batchedtensor(value)
    return not (is_functional_tensor(value) or is_wrapped)


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node that computes a traced tensor, or None for a tensor from outside the graph."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot: Any = get_proxy_slot(from_fun(tensor), mode.tracer, None)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return None if slot is None else slot.proxy.node


def origin_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node that computes a tensor's value, looking through ops that only cut its history."""
    node = node_of(tensor)
    while node is not None and node.target in _IDENTITIES:
        node = node.all_input_nodes[0]
    return node
