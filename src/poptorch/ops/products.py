"""Matrix products in pieces, one after the other, each as one op.

The derivatives of such a product are products in pieces too, cut along the same dimension of the problem: the rows of
the left matrix, the dimension that is summed over, or the columns of the right matrix. What a product needs beside its
operands and its result, such as a copy of an operand as float32 or in another order of memory, it needs for one piece
at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS, INNER, COLUMNS = "input_channels", "reducing_dim", "output_channels"
# For each way to cut a product: how that of the gradient with the right operand is cut, and that with the left.
_DERIVATIVES = {ROWS: (ROWS, INNER), INNER: (COLUMNS, ROWS), COLUMNS: (INNER, COLUMNS)}


@torch.library.custom_op("poptorch::serialized_matmul", mutates_args=())
def serialized_matmul(lhs: Tensor, rhs: Tensor, mode: str, factor: int, keep_precision: bool) -> Tensor:
    """`torch.matmul(lhs, rhs)` of at least two dimensions each, computed in `factor` pieces.

    With `keep_precision`, sums over pieces are kept in float32 for operands of 16 bits.
    """
    if mode == INNER:
        total = lhs.new_zeros(_shape(lhs, rhs), dtype=torch.float32 if keep_precision else None)
        for left, right in zip(lhs.tensor_split(factor, -1), rhs.tensor_split(factor, -2), strict=True):
            _add_product(total, left, right)
        return total.to(lhs.dtype)
    result = lhs.new_zeros(_shape(lhs, rhs))
    dim = -2 if mode == ROWS else -1
    cut, whole = (lhs, rhs) if mode == ROWS else (rhs, lhs)
    whole = _wide(whole)
    for part, piece in zip(result.tensor_split(factor, dim), cut.tensor_split(factor, dim), strict=True):
        _add_product(part, *((piece, whole) if mode == ROWS else (whole, piece)))
    return result


@torch.library.custom_op("poptorch::serialized_outer", mutates_args=())
def serialized_outer(lhs: Tensor, gradient: Tensor, mode: str, factor: int, keep_precision: bool) -> Tensor:
    """The gradient of the matrix that a whole batch `lhs` was multiplied with; `mode` is that of the product."""
    left, right = lhs.flatten(0, -3).transpose(1, 2), gradient.flatten(0, -3)
    shape = (lhs.shape[-1], gradient.shape[-1])
    if mode == ROWS:
        total = lhs.new_zeros(shape, dtype=torch.float32 if keep_precision else None)
        for piece, other in zip(left.tensor_split(factor, 2), right.tensor_split(factor, 1), strict=True):
            _add_sum(total, piece, other)
        return total.to(lhs.dtype)
    result = lhs.new_zeros(shape)
    cut = left.tensor_split(factor, 1) if mode == INNER else right.tensor_split(factor, 2)
    for part, piece in zip(result.tensor_split(factor, 0 if mode == INNER else 1), cut, strict=True):
        _add_sum(part, *((piece, right) if mode == INNER else (left, piece)))
    return result


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to where it belongs, if possible without memory for it beside."""
    left, right = _wide(left), _wide(right)
    if total.dtype != left.dtype or total.dim() > 3:
        total.add_(torch.matmul(left, right))
    elif total.dim() == 2:
        total.addmm_(left, right)
    else:
        total.baddbmm_(left.expand(len(total), -1, -1), right.expand(len(total), -1, -1))


def _add_sum(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the products of a batch of pairs of matrices."""
    left, right = _wide(left), _wide(right)
    if total.dtype != left.dtype:
        total.add_(torch.zeros_like(total, dtype=left.dtype).addbmm_(left, right))
    else:
        total.addbmm_(left, right)


def _wide(tensor: Tensor) -> Tensor:
    """16-bit floats as float32: CPUs without 16-bit arithmetic take tens of times longer to multiply the former."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@serialized_matmul.register_fake
def _(lhs: Tensor, rhs: Tensor, *rest: Any) -> Tensor:
    return lhs.new_empty(_shape(lhs, rhs))


@serialized_outer.register_fake
def _(lhs: Tensor, gradient: Tensor, *rest: Any) -> Tensor:
    return lhs.new_empty(lhs.shape[-1], gradient.shape[-1])


@serialized_matmul.register_vmap
def _(info: Any, dims: tuple[int | None, ...], lhs: Tensor, rhs: Tensor, *rest: Any) -> Any:
    rank = max(t.dim() - (dim is not None) for t, dim in zip((lhs, rhs), dims, strict=False))
    left, right = _batch_first(lhs, dims[0], rank), _batch_first(rhs, dims[1], rank)
    return serialized_matmul(left, right, *rest), 0


def _batch_first(operand: Tensor, dim: int | None, rank: int) -> Tensor:
    """An operand of matmul with the mapped dimension in front of `rank` others; of size 1 if it is not mapped."""
    batch = operand.unsqueeze(0) if dim is None else operand.movedim(dim, 0)
    return batch.reshape(len(batch), *[1] * (rank + 1 - batch.dim()), *batch.shape[1:])


def _shape(lhs: Tensor, rhs: Tensor) -> list[int]:
    return [*torch.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2]), lhs.shape[-2], rhs.shape[-1]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    lhs, rhs, ctx.mode, *ctx.rest = inputs
    ctx.save_for_backward(lhs, rhs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    lhs, rhs = ctx.saved_tensors
    of_lhs, of_rhs = _DERIVATIVES[ctx.mode]
    needs_lhs, needs_rhs, *_ = ctx.needs_input_grad
    left, right = None, None
    if needs_lhs:
        left = serialized_matmul(gradient, rhs.transpose(-2, -1), of_lhs, *ctx.rest).sum_to_size(lhs.shape)
    if needs_rhs and rhs.dim() == 2 and lhs.dim() > 2:
        right = serialized_outer(lhs, gradient, ctx.mode, *ctx.rest)
    elif needs_rhs:
        right = serialized_matmul(lhs.transpose(-2, -1), gradient, of_rhs, *ctx.rest).sum_to_size(rhs.shape)
    return left, right, None, None, None


def _differentiate_outer(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    lhs, of_result = ctx.saved_tensors
    return of_result @ gradient.t(), lhs @ gradient, None, None, None


serialized_matmul.register_autograd(_differentiate, setup_context=_keep)
serialized_outer.register_autograd(_differentiate_outer, setup_context=_keep)
