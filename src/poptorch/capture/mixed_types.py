"""The type of an operation that mixes float16 and float32.

Layers compute in the type of their activation: weights are cast to it, and their gradients come back in the weights'
own type. Any other operation computes in float16, unless `Precision.halfFloatCasting` asks for PyTorch's promotion.
Where float64 or bfloat16 meet weights, which are float32 in the program then, they become float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from poptorch.capture.private import pytree
from poptorch.enums import HalfFloatCastingBehavior

Function = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

MIXED = {torch.float16, torch.float32}
_NOT_ON_DEVICE = {torch.float64, torch.bfloat16}
_BFLOAT16 = {torch.bfloat16}


def unify(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], casting: HalfFloatCastingBehavior
) -> Arguments:
    """The arguments of a torch function with its float16 and float32 tensors cast to one type, where that is due."""
    if func not in _KNOWN:
        return args, kwargs
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    types = {tensor.dtype for tensor in tensors}
    foreign = types & _NOT_ON_DEVICE
    if func in _OF_ONE_FLOAT and torch.float32 in types and foreign and (func not in _NORMS or foreign != _BFLOAT16):
        return _as_on_device(args), _as_on_device(kwargs)
    if not types >= MIXED or (func not in _LAYERS and func not in _OPERATIONS):
        return args, kwargs
    if func in _LAYERS:
        return cast_all(tensors[0].dtype, args, kwargs)
    if casting is not HalfFloatCastingBehavior.HalfUpcastToFloat:
        return cast_all(torch.float16, args, kwargs)
    return cast_all(torch.float32, args, kwargs) if func in _PRODUCTS else (args, kwargs)


def _as_on_device(arguments: Any) -> Any:
    """Without float64 and bfloat16: weights that have these types in the module are float32 in the program."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in _NOT_ON_DEVICE else t, arguments)


def cast_all(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments with every float16 and float32 tensor cast to one type."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in MIXED else tensor

    return pytree.tree_map_only(torch.Tensor, cast, args), pytree.tree_map_only(torch.Tensor, cast, kwargs)


def spellings(names: Iterable[str]) -> frozenset[Function]:
    """Every spelling of some operations that leaves its operands alone: function, method, operator."""
    spellings = [spelling for name in names for spelling in (name, f"__{name}__", f"__r{name}__")]
    owners = (torch, torch.Tensor, F)
    return frozenset(getattr(owner, name) for owner in owners for name in spellings if hasattr(owner, name))


_LAYERS: frozenset[Function] = frozenset(
    {
        F.linear,
        F.bilinear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        F.layer_norm,
        F.group_norm,
        F.rms_norm,
        F.prelu,
        F.multi_head_attention_forward,
        F.linear_cross_entropy,
    }
)

# fmt: off
_PRODUCTS = spellings((
    "matmul", "mm", "bmm", "mv", "dot", "addmm", "addmv", "addbmm", "baddbmm", "einsum", "tensordot", "chain_matmul",
))  # PyTorch refuses to multiply matrices of different types
_OPERATIONS = _PRODUCTS | spellings((
    "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "truediv", "true_divide", "floordiv",
    "floor_divide", "mod", "remainder", "fmod", "pow", "float_power", "maximum", "minimum", "fmax", "fmin", "atan2",
    "hypot", "copysign", "lerp", "addcmul", "addcdiv", "where", "cat", "concat", "concatenate", "stack", "hstack",
    "vstack", "outer", "cross", "clamp", "logaddexp", "xlogy",
    "eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater", "greater_equal",
)) | {
    F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.cross_entropy, F.nll_loss, F.kl_div, F.poisson_nll_loss,
    F.margin_ranking_loss, F.cosine_embedding_loss, F.triplet_margin_loss, F.scaled_dot_product_attention,
    F.gaussian_nll_loss, F.hinge_embedding_loss, F.multilabel_soft_margin_loss, F.soft_margin_loss,
    F.triplet_margin_with_distance_loss,
}
_NORMS = {F.batch_norm, F.instance_norm, F.layer_norm, F.group_norm, F.rms_norm}  # take bfloat16 beside float32
_OF_ONE_FLOAT = _LAYERS | _PRODUCTS | _NORMS | {
    F.scaled_dot_product_attention, torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell,
}  # PyTorch promotes none of their operands
_KNOWN = _LAYERS | _OPERATIONS | _OF_ONE_FLOAT
# fmt: on
