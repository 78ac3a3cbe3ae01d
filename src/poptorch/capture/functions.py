"""Torch functions that a trace replaces by others of the same meaning.

Some functions look at values in C++, where the tracer cannot see it. Each has an equivalent here that stays in the
graph, or ends in an error with the user's line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from poptorch.capture.ctc import ctc_loss
from poptorch.capture.proxies import node_of
from poptorch.capture.source import current_user_line
from poptorch.errors import CompileError, explain

Function = Callable[..., Any]


def replacement(func: Function, args: tuple[Any, ...]) -> Function | None:
    """What to call instead of `func`, if it cannot be traced as it is."""
    chosen = _REPLACEMENTS.get(func)
    if chosen is None or not any(isinstance(arg, torch.Tensor) and node_of(arg) is not None for arg in args):
        return None
    return chosen


class CumulativeMomentum(float):
    """The momentum of a batch norm that averages over all batches: one over their number, known only at run time."""

    layer: torch.nn.Module

    @classmethod
    def of(cls, layer: torch.nn.Module) -> CumulativeMomentum:
        momentum = cls(0.0)
        momentum.layer = layer
        return momentum


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`F.batch_norm` that also understands `CumulativeMomentum`."""
    norm = _for_any_type(F.batch_norm)
    cumulative = training and isinstance(momentum, CumulativeMomentum)
    if not cumulative or running_mean is None or running_var is None:
        return norm(input, running_mean, running_var, weight, bias, training, float(momentum), eps)
    mean, variance = running_mean.clone(), running_var.clone()
    result = norm(input, mean, variance, weight, bias, training, 1.0, eps)  # leaves this batch's own statistics
    share = 1.0 / momentum.layer.num_batches_tracked.to(mean.dtype)  # pyright: ignore
    running_mean.lerp_(mean, share)
    running_var.lerp_(variance, share)
    return result


def _for_any_type(norm: Function) -> Function:
    """A norm layer with running statistics that accepts activation, weights and statistics of different types.

    The result has the type of the activation; the statistics keep theirs.
    """

    def mixed(
        input: torch.Tensor,
        running_mean: torch.Tensor | None = None,
        running_var: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        parameters = (running_mean, running_var, weight, bias)
        types = {tensor.dtype for tensor in parameters if tensor is not None}
        if types <= {input.dtype} or types == {torch.float32}:
            return norm(input, *parameters, *rest, **named)
        wide = [None if tensor is None else tensor.float() for tensor in parameters]
        result = norm(input.float(), *wide, *rest, **named)
        for statistic, new in zip(parameters[:2], wide[:2], strict=True):
            if statistic is not None and new is not None and statistic is not new:
                statistic.copy_(new)
        return result.to(input.dtype)

    return mixed


def _get_data(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value` as a write into the tensor, which is what it means for everybody who holds it."""
    if tensor.shape != value.shape:
        raise CompileError(
            explain(
                f".data of a tensor of shape {list(tensor.shape)} is replaced by one of shape {list(value.shape)}.",
                where=str(current_user_line()),
                fix="keep the shape: a compiled program cannot change it",
            )
        )
    with torch.no_grad():
        tensor.detach().copy_(value)


def _refuse(what: str, fix: str) -> Function:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CompileError(explain(f"{what}", where=str(current_user_line()), fix=fix))

    return refuse


_ONLY_WHILE_RUNNING = "needs the values of a tensor that only exists while the program runs."
_HOST_FIX = "use the torch function of the same purpose, or do this outside the model"
_PACK_FIX = "pad the sequences to one length and mask what is padding"
_PACKING = (
    "packing sequences makes shapes depend on the lengths in each batch, and a compiled program has fixed shapes."
)

_REPLACEMENTS: dict[Function, Function] = {
    F.ctc_loss: ctc_loss,
    torch.ctc_loss: ctc_loss,
    F.batch_norm: _batch_norm,
    F.instance_norm: _for_any_type(F.instance_norm),
    torch.Tensor.data.__get__: _get_data,  # pyright: ignore
    torch.Tensor.data.__set__: _set_data,  # pyright: ignore
    torch.Tensor.numpy: _refuse(f".numpy() {_ONLY_WHILE_RUNNING}", _HOST_FIX),
    torch.Tensor.__array__: _refuse(f"converting to a NumPy array {_ONLY_WHILE_RUNNING}", _HOST_FIX),
    torch.Tensor.data_ptr: _refuse(f".data_ptr() {_ONLY_WHILE_RUNNING}", _HOST_FIX),
    torch._VF._pack_padded_sequence: _refuse(_PACKING, _PACK_FIX),  # pyright: ignore
    torch._C._VariableFunctions._pack_padded_sequence: _refuse(_PACKING, _PACK_FIX),  # pyright: ignore
}
