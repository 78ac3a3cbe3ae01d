"""From a tensor that `forward` holds while it is traced to the graph node that computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.functional_utils import from_fun
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node that computes a traced tensor, or None for a tensor from outside the graph."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot: Any = get_proxy_slot(from_fun(tensor), mode.tracer, None)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return None if slot is None else slot.proxy.node
