"""Tensors from outside the module, which are constants of a trace.

What `forward` writes to one counts for the rest of the call, for everything that shows the same memory as well.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from poptorch.capture.private import disable_current_modes, to_fun
from poptorch.capture.proxies import node_of
from poptorch.capture.source import current_user_line
from poptorch.capture.views import at_start, overlap, same_view
from poptorch.errors import CompileError, explain

Pair = tuple[torch.Tensor, torch.Tensor]  # a tensor, and what it is in the trace


class Constants:
    """The constants of one trace."""

    def __init__(self) -> None:
        self._by_memory: defaultdict[int, list[Pair]] = defaultdict(list)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor is in the trace; raises if that was written through a tensor of which this is no plain view."""
        if tensor._is_zerotensor():  # which PyTorch makes in the middle of derivatives, without memory
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise CompileError(_not_dense(tensor))
        if not tensor.numel():
            return to_fun(tensor.detach())
        with torch.no_grad():
            owner, constant = self._known(tensor) or self._new(tensor)
        for other, written in self._sharing(tensor):
            if other is not owner and _is_written(other, written) and overlap(other, tensor):
                raise CompileError(_written_otherwise(tensor, other))
        return constant

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether `forward` has written to memory that a tensor shows."""
        sharing = [] if tensor._is_zerotensor() or tensor.layout is not torch.strided else self._sharing(tensor)
        return any(_is_written(owner, constant) and overlap(owner, tensor) for owner, constant in sharing)

    def _sharing(self, tensor: torch.Tensor) -> list[Pair]:
        return self._by_memory[tensor.untyped_storage().data_ptr()]

    def _known(self, tensor: torch.Tensor) -> Pair | None:
        """The constant that a tensor is a plain view of, and that view."""
        for owner, constant in self._sharing(tensor):
            view = constant if owner is tensor else same_view(tensor, owner, constant)
            if view is not None:
                return owner, view
        return None

    def _new(self, tensor: torch.Tensor) -> Pair:
        for owner in (tensor if tensor._base is None else tensor._base, tensor):
            self._sharing(tensor).append((owner, _enter(owner)))
            found = self._known(tensor)
            if found is not None:
                return found
        raise AssertionError("a tensor is a view of itself")


def _enter(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is in the trace: with values, it may be one that the trace has made, without its wrapping."""
    if node_of(tensor) is not None:
        return to_fun(tensor)
    with disable_current_modes():  # a copy is made now, not whenever the program runs
        plain = at_start(tensor.detach().resolve_conj().resolve_neg())
    return to_fun(plain)


def _is_written(owner: torch.Tensor, constant: torch.Tensor) -> bool:
    """Whether the trace has computed a new value for a constant."""
    node = node_of(constant)
    return node is not None and node.op != "get_attr" and node is not node_of(owner)


def _not_dense(tensor: torch.Tensor) -> str:
    kind = "quantized" if tensor.is_quantized else f"sparse ({tensor.layout})"
    return explain(
        f"forward uses a {kind} tensor of shape {list(tensor.shape)}, and a compiled program computes with dense ones.",
        where=str(current_user_line()),
        fix="convert it once, outside of forward: " + (".dequantize()" if tensor.is_quantized else ".to_dense()"),
    )


def _written_otherwise(tensor: torch.Tensor, other: torch.Tensor) -> str:
    return explain(
        f"forward uses a tensor of {tensor.dtype} and shape {list(tensor.shape)} whose memory it has changed through "
        f"another one, of {other.dtype} and shape {list(other.shape)}.",
        where=str(current_user_line()),
        fix="make the view in forward, or clone the tensor there before writing to it",
    )
