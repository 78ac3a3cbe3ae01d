"""Hints about memory and time; the results of a model are the same without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from poptorch.capture import is_capturing
from poptorch.enums import MatMulSerializationMode, OverlapMode
from poptorch.errors import Error, OptionError, OptionValueError, explain
from poptorch.ops.identities import hinted
from poptorch.ops.products import serialized_matmul

T = TypeVar("T")


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Say how much of a tile's memory the operation that computed `tensor` may use for temporary data, from 0 to 1.

    It is about the matrix product, convolution, gather, scatter or recurrent layer that `tensor` comes from, also when
    one or two other operations, such as the addition of a bias, lie between. The returned tensor must be used.

    >>> import torch, poptorch
    >>> poptorch.set_available_memory(torch.ones(2, 2) @ torch.ones(2, 1), 0.3)
    tensor([[2.],
            [2.]])
    """
    if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Error(
            explain(f"set_available_memory takes a tensor, not {tensor!r}.", fix="pass the result of a product")
        )
    return hinted(tensor, "available_memory", float(available_memory_proportion)) if is_capturing() else tensor


def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """`torch.matmul(lhs, rhs)` in `factor` pieces, one after the other, so that less memory is needed at a time.

    `mode` says what is cut: the rows of `lhs`, the dimension that is summed over, or the columns of `rhs`. With
    `keep_precision`, float16 pieces are added up in float32.

    >>> import torch, poptorch
    >>> mode = poptorch.MatMulSerializationMode.OutputChannels
    >>> poptorch.serializedMatMul(torch.ones(2, 3), torch.ones(3, 4), mode, factor=2).shape
    torch.Size([2, 4])
    """
    _check_product(mode, factor, keep_precision)
    if mode is MatMulSerializationMode.Disabled or not is_capturing():
        return torch.matmul(lhs, rhs)
    left, right = torch.atleast_2d(lhs), rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
    _check_factor(left, right, mode, factor)
    rows = left.shape[:-1]
    folds = right.dim() == 2 and left.dim() > 2 and left.is_contiguous()
    if folds:  # one product for the whole batch, without a copy of it
        left = left.reshape(-1, left.shape[-1])
    product = serialized_matmul(left, right.to(left.dtype), mode.value, factor, keep_precision)
    if folds:
        product = product.reshape(*rows, right.shape[-1])
    if rhs.dim() == 1:
        product = product.squeeze(-1)
    return product.squeeze(-1 if rhs.dim() == 1 else -2) if lhs.dim() == 1 else product


def _check_product(mode: object, factor: object, keep_precision: object) -> None:
    for name, value, kind in (
        ("mode", mode, MatMulSerializationMode),
        ("factor", factor, int),
        ("keep_precision", keep_precision, bool),
    ):
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            shown = f"poptorch.{kind.__name__}" if kind is MatMulSerializationMode else kind.__name__
            raise OptionError(f"serializedMatMul takes a {shown} as {name}, not {value!r}")


def _check_factor(lhs: torch.Tensor, rhs: torch.Tensor, mode: MatMulSerializationMode, factor: int) -> None:
    sizes = {
        MatMulSerializationMode.InputChannels: (lhs.shape[-2], "rows of lhs"),
        MatMulSerializationMode.ReducingDim: (lhs.shape[-1], "columns of lhs"),
        MatMulSerializationMode.OutputChannels: (rhs.shape[-1], "columns of rhs"),
    }
    size, what = sizes[mode]
    if factor < 1 or size % factor:
        raise Error(
            explain(
                f"serializedMatMul cannot cut {size} {what} into {factor} equal pieces.",
                shapes=f"lhs {list(lhs.shape)}, rhs {list(rhs.shape)}, mode {mode.name}",
                fix=f"choose a factor that divides {size}, or MatMulSerializationMode.Disabled",
            )
        )


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Return the tensors, marked as values to store for the backward pass where others are computed again.

    One tensor gives a tensor, several give a tuple, and a list or tuple gives one of the same kind.

    >>> import torch, poptorch
    >>> x, y = poptorch.recomputationCheckpoint(torch.ones(1), torch.ones(1))
    """
    marked = tuple(_checkpoint(item) for item in tensors)
    return marked[0] if len(marked) == 1 else marked


def _checkpoint(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return _rebuild(value, [_checkpoint(item) for item in cast("list[Any]", value)])
    if not isinstance(value, torch.Tensor):
        raise OptionValueError(
            explain(
                f"All inputs must be tensors: recomputationCheckpoint was given {value!r}.",
                fix="pass tensors, or lists and tuples of them",
            )
        )
    return hinted(value, "checkpoint", True) if is_capturing() else value


def set_overlap_for_input(tensors: T, mode: OverlapMode) -> T:
    """Return inputs of the model, marked to be loaded while the IPU computes; `mode` says for how long ahead.

    Takes a tensor, or any nesting of tuples, lists and dictionaries. Use what is returned, and not the input itself.
    """
    return _set_overlap("set_overlap_for_input", "overlap_input", tensors, mode)


def set_overlap_for_output(tensors: T, mode: OverlapMode) -> T:
    """Return results of the model, marked to be handed back while the IPU goes on; `mode` says for how long after.

    Takes a tensor, or any nesting of tuples, lists and dictionaries. Return what is returned, and not the value itself.
    """
    return _set_overlap("set_overlap_for_output", "overlap_output", tensors, mode)


def _set_overlap(function: str, kind: str, tensors: T, mode: OverlapMode) -> T:
    if not isinstance(mode, OverlapMode):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"{function} takes a poptorch.OverlapMode, not {mode!r}")
    if not is_capturing():
        return tensors
    return _map_tensors(lambda tensor: hinted(tensor, kind, mode.value), tensors)


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same structure with every tensor replaced; anything else stays."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return type(value)((key, _map_tensors(function, item)) for key, item in items)  # pyright: ignore
    if isinstance(value, (list, tuple)):
        return _rebuild(value, [_map_tensors(function, item) for item in cast("list[Any]", value)])
    return value


def _rebuild(like: Any, items: list[Any]) -> Any:
    """A list or tuple of the same type, which may be a named tuple."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
