"""The type of an operation that mixes float16 and float32.

Layers compute in the type of their activation: weights are cast to it, and their gradients come back in the weights'
own type. What writes into a tensor keeps the type of that. Any other operation computes in float16, unless
`Precision.halfFloatCasting` asks for PyTorch's promotion. Where float64 or bfloat16 meet weights, which are float32 in
the program then, they become float32.
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
    if isinstance(out := kwargs.get("out"), torch.Tensor):
        return _for_target(out, args, kwargs)
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    types = {tensor.dtype for tensor in tensors}
    foreign = types & _NOT_ON_DEVICE
    if func in _OF_ONE_FLOAT and torch.float32 in types and foreign and (func not in _NORMS or foreign != _BFLOAT16):
        return _as_on_device(args), _as_on_device(kwargs)
    if not types >= MIXED or (func not in _LIKE_THE_FIRST and func not in _OPERATIONS):
        return args, kwargs
    if func in _LIKE_THE_FIRST:
        return cast_all(next(t.dtype for t in tensors if t.dtype in MIXED), args, kwargs)
    if casting is not HalfFloatCastingBehavior.HalfUpcastToFloat:
        return cast_all(torch.float16, args, kwargs)
    return cast_all(torch.float32, args, kwargs) if func in _OF_ONE_TYPE else (args, kwargs)


def _for_target(out: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a function that writes its result into `out`: operands in its type, and itself as it is."""
    if out.dtype not in MIXED:
        return args, kwargs
    operands, options = cast_all(out.dtype, args, kwargs)
    return operands, {**options, "out": out}


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


# fmt: off
_WRITING = spellings((
    "index_put", "index_put_", "index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_",
    "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "masked_scatter",
    "masked_scatter_",
))
_RECURRENT = spellings((
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
))
_LAYERS: frozenset[Function] = frozenset({
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    F.layer_norm, F.group_norm, F.rms_norm, F.prelu, F.multi_head_attention_forward, F.linear_cross_entropy,
    F.grid_sample,
})
_LIKE_THE_FIRST = _WRITING | _RECURRENT | _LAYERS
_PRODUCTS = spellings((
    "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "addmm", "addmv", "addbmm", "baddbmm", "einsum", "tensordot",
    "chain_matmul",
))
_OF_ONE_TYPE = _PRODUCTS | spellings(("cdist", "lerp", "isclose")) | {
    torch.linalg.vecdot, torch.linalg.multi_dot,
    F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.cross_entropy, F.nll_loss, F.kl_div, F.poisson_nll_loss,
    F.margin_ranking_loss, F.cosine_embedding_loss, F.triplet_margin_loss, F.scaled_dot_product_attention,
    F.gaussian_nll_loss, F.hinge_embedding_loss, F.multilabel_soft_margin_loss, F.soft_margin_loss,
    F.triplet_margin_with_distance_loss, F.multi_margin_loss,
}  # PyTorch refuses some of these for operands of different types, and promotes them in the others
_OPERATIONS = _OF_ONE_TYPE | spellings((
    "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "truediv", "true_divide", "floordiv",
    "floor_divide", "mod", "remainder", "fmod", "pow", "float_power", "maximum", "minimum", "fmax", "fmin", "atan2",
    "hypot", "copysign", "nextafter", "heaviside", "addcmul", "addcdiv", "where", "cat", "concat", "concatenate",
    "stack", "hstack", "vstack", "dstack", "row_stack", "column_stack", "block_diag", "outer", "ger", "addr", "kron",
    "cross", "clamp", "logaddexp", "logaddexp2", "xlogy", "dist", "cosine_similarity", "pairwise_distance",
    "eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater", "greater_equal",
)) | {torch.linalg.cross, torch.special.xlogy, torch.special.xlog1py}
_NORMS = {F.batch_norm, F.instance_norm, F.layer_norm, F.group_norm, F.rms_norm}  # take bfloat16 beside float32
_OF_ONE_FLOAT = _LAYERS | _PRODUCTS | _NORMS | {
    F.scaled_dot_product_attention, torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell,
}  # PyTorch promotes none of their operands
_KNOWN = _LIKE_THE_FIRST | _OPERATIONS | _OF_ONE_FLOAT
# fmt: on
