"""Types of operands that PyTorch refuses when it computes, while its functions that only tell shapes accept them.

A trace without values would record such an op, and the program would fail when it runs, without the user's line, or
compute what PyTorch does not. So these ops are traced with values, where PyTorch itself decides.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from poptorch.capture.private import OpOverload

Op = OpOverload


def may_be_refused(func: Op, args: Sequence[Any]) -> bool:
    """Whether the kernel of an op might not take operands of these types."""
    name = _name(func)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if name in _OF_ONE_TYPE:
        values = [arg for arg, is_index in zip(args, _indices(func), strict=False) if not is_index]
        types = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        return len(types) > 1 or torch.bool in types
    if name in _FLOATING:
        return bool(tensors) and not tensors[0].is_floating_point()
    if name in _OF_NUMBERS:
        return any(tensor.dtype is torch.bool for tensor in tensors)
    return name in _OF_INTEGERS and tensors[-1].dtype.is_floating_point


def check_in_place(func: Op, args: Sequence[Any]) -> None:
    """Refuse what an op cannot write into its first operand: functionalisation would cast it."""
    if func._schema.name not in _PROMOTING_IN_PLACE:
        return
    target, other = args[0], args[1]
    result = torch.result_type(target, other)
    if func._schema.name == "aten::div_" and func._overloadname in ("Tensor", "Scalar") and _is_integral(result):
        result = torch.get_default_dtype()
    if not torch.can_cast(result, target.dtype):
        raise RuntimeError(
            f"result type {_short(result)} can't be cast to the desired output type {_short(target.dtype)}"
        )


def _is_integral(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _name(func: Op) -> str:
    return func._schema.name.partition("::")[2].removesuffix("_")


@functools.cache
def _indices(func: Op) -> tuple[bool, ...]:
    return tuple(argument.name in ("index", "indices") for argument in func._schema.arguments)


# fmt: off
_OF_ONE_TYPE = frozenset({
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "_addmm_activation",
    "convolution", "_convolution", "index_add", "index_copy", "index_put", "grid_sampler_2d", "grid_sampler_3d",
    "_cdist_forward", "linalg_cross", "polar", "complex",
})
_FLOATING = frozenset({
    "_softmax", "_log_softmax", "log_sigmoid_forward", "gelu", "softplus", "glu", "elu", "leaky_relu", "hardswish",
    "_prelu_kernel", "mse_loss", "huber_loss", "smooth_l1_loss", "soft_margin_loss", "multi_margin_loss",
    "multilabel_margin_loss_forward", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "im2col", "col2im", "var", "std", "var_mean", "std_mean", "frac",
    "lerp", "nll_loss_forward", "nll_loss2d_forward",
})
_OF_NUMBERS = frozenset({
    "sub", "rsub", "neg", "relu", "abs", "floor", "ceil", "round", "topk", "median", "kthvalue", "pow", "fmod",
})  # neither true nor false
_OF_INTEGERS = frozenset({"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "index_select"})
_PROMOTING_IN_PLACE = frozenset(
    f"aten::{name}_" for name in ("add", "sub", "mul", "div", "pow", "remainder", "fmod", "floor_divide")
)
# fmt: on
