"""Torch functions that a trace replaces by others of the same meaning.

Some functions look at values in C++, where the tracer cannot see it. Each has an equivalent here that stays in the
graph, or ends in an error with the user's line. Others add up more numbers than float16 can hold the sum of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from poptorch.capture.higher_order import higher_order_replacement
from poptorch.capture.mixed_types import spellings
from poptorch.capture.private import HigherOrderOperator, pack_padded_sequence, pytree
from poptorch.capture.proxies import node_of
from poptorch.capture.source import current_user_line
from poptorch.errors import CompileError, explain
from poptorch.ir.ranges import within
from poptorch.ops.ctc import ctc_loss

Function = Callable[..., Any]
_NARROW = frozenset({torch.float16, torch.bfloat16})


def replacement(func: Function, args: tuple[Any, ...]) -> Function | None:
    """What to call instead of `func`, if it cannot be traced as it is."""
    if isinstance(func, HigherOrderOperator):
        return higher_order_replacement(func)
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
        result = norm(input, *wide, *rest, **named)  # PyTorch takes float32 parameters for activations of any type
        for statistic, new in zip(parameters[:2], wide[:2], strict=True):
            if statistic is not None and new is not None and statistic is not new:
                statistic.copy_(new)
        return result.to(input.dtype)

    return mixed


def _in_float32(function: Function) -> Function:
    """A function that adds up many numbers, with 16-bit operands as float32 and its results rounded back.

    float16 ends at 65504, which sums over rows and classes exceed on the way to a mean or a logarithm. A recurrent
    layer adds up over time, and PyTorch has a kernel for all of its steps in float32 only.
    """

    def wide(*args: Any, **kwargs: Any) -> Any:
        values = pytree.tree_leaves((args, kwargs))
        types = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()}
        has_type = any(isinstance(value, torch.dtype) for value in values)  # of the result, which is asked for
        if has_type or len(types) != 1 or not types <= _NARROW:
            return function(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(torch.Tensor, _widen, (args, kwargs))
        dtype = types.pop()
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype), function(*args, **kwargs))

    return wide


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor


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


def _polygamma_in_place(tensor: torch.Tensor, n: int) -> torch.Tensor:
    """`Tensor.polygamma_`, which PyTorch does not functionalise."""
    return tensor.copy_(torch.polygamma(n, tensor))


def _tensor_split(
    input: torch.Tensor, indices_or_sections: Any = None, dim: int = 0, **named: Any
) -> tuple[torch.Tensor, ...]:
    """`torch.tensor_split`; where a tensor says where to split, its values are read, and frozen."""
    where: Any = named.get("indices", named.get("sections", indices_or_sections))
    if isinstance(where, torch.Tensor):
        where = [int(index) for index in where.unbind()] if where.dim() else int(where)
    return torch.tensor_split(input, where, dim=dim)


def _without_gradient(function: Function) -> Function:
    """A function that makes a sparse tensor: a trace loses the history of those."""

    def checked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise CompileError(
                explain(
                    "a gradient would have to pass through a sparse tensor, and a compiled step works on dense ones.",
                    where=str(current_user_line()),
                    fix="keep the tensor dense, for example with torch.where or a mask, or detach() it",
                )
            )
        return function(tensor, *args, **kwargs)

    return checked


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


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`F.one_hot` that checks what it is given, as PyTorch's own does outside of a trace."""
    if tensor.dtype is not torch.int64 or not tensor.numel() or num_classes == 0 or num_classes < -1:
        return F.one_hot(tensor, num_classes)
    size = int(tensor.max()) + 1 if num_classes == -1 else num_classes
    classes = within(tensor, 0, max(size, 1) - 1, "one_hot", "class")
    return (classes.unsqueeze(-1) == torch.arange(max(size, 1))).to(torch.int64)


def _linear_cross_entropy(*args: Any, options: Any = None, **named: Any) -> torch.Tensor:
    """Without chunks, whose backward pass changes in place what the forward pass has kept."""
    return F.linear_cross_entropy(*args, **named)


# fmt: off
_SUMMING = spellings((
    "l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "cross_entropy", "nll_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "gaussian_nll_loss",
    "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
    "multilabel_soft_margin_loss", "cosine_embedding_loss", "triplet_margin_loss", "log_softmax", "logsumexp", "cdist",
    "lstm", "gru", "rnn_tanh", "rnn_relu",
)) | {torch.special.log_softmax, torch.special.logsumexp}
# fmt: on

_SPARSE = spellings(
    ("to_sparse", "to_sparse_coo", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc", "sparse_mask")
)

_REPLACEMENTS: dict[Function, Function] = {
    **{function: _without_gradient(function) for function in _SPARSE},
    **dict.fromkeys(spellings(("tensor_split",)), _tensor_split),
    **{function: _in_float32(function) for function in _SUMMING},
    F.linear_cross_entropy: _in_float32(_linear_cross_entropy),
    F.ctc_loss: _in_float32(ctc_loss),
    torch.ctc_loss: _in_float32(ctc_loss),
    F.one_hot: _one_hot,
    F.batch_norm: _batch_norm,
    F.instance_norm: _for_any_type(F.instance_norm),
    torch.Tensor.data.__get__: _get_data,  # pyright: ignore
    torch.Tensor.data.__set__: _set_data,  # pyright: ignore
    torch.Tensor.polygamma_: _polygamma_in_place,
    torch.Tensor.numpy: _refuse(f".numpy() {_ONLY_WHILE_RUNNING}", _HOST_FIX),
    torch.Tensor.__array__: _refuse(f"converting to a NumPy array {_ONLY_WHILE_RUNNING}", _HOST_FIX),
    torch.Tensor.data_ptr: _refuse(f".data_ptr() {_ONLY_WHILE_RUNNING}", _HOST_FIX),
    **dict.fromkeys(pack_padded_sequence, _refuse(_PACKING, _PACK_FIX)),
}
