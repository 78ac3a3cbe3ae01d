"""Which ops the inductor engine takes apart before it generates code, and which stay calls of PyTorch's kernels.

Inductor's own choice is right but for images on a CPU, where some of PyTorch's kernels are several times faster than
the loops that Inductor generates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from poptorch.engines.private import (
    get_layout_constraint_tag,
    inductor_prims,
    lowerings,
    make_fallback,
    select_decomp_table,
    tag_to_layout_constraint,
)

aten = torch.ops.aten
_MAX_POOL = aten.max_pool2d_with_indices.default
_MAX_POOL_BACKWARD = aten.max_pool2d_with_indices_backward.default
_NONE, _MEAN = 0, 1  # reductions
_MULTILABEL_MARGIN = aten.multilabel_margin_loss_forward.default
_FEW_ELEMENTS = 2**15  # a loop of our own costs less than a call of PyTorch
_CONVOLUTION_BACKWARD = aten.convolution_backward.default
_WIDE = 64  # channels, from which on a matrix product of them is efficient
_MANY_COLUMNS = 2**22  # elements of a matrix that costs more to write than its product saves


def decompositions() -> dict[Any, Callable[..., Any]]:
    """For each op that is taken apart, how."""
    table = dict(select_decomp_table())
    table.pop(_MAX_POOL, None)
    table[_MULTILABEL_MARGIN] = _compare_labels_with_others
    table[_MAX_POOL_BACKWARD] = _ask_who_was_chosen
    table[_CONVOLUTION_BACKWARD] = _multiply_columns
    return table


def runs_in_pytorch(node: fx.Node) -> bool:
    """Whether Inductor must not generate code for an op that is left after decomposition."""
    return node.target in (_MAX_POOL, _MAX_POOL_BACKWARD) or _is_channel_sum(node)


def allow_call(op: object) -> None:
    """Let Inductor call PyTorch for an op that it neither generates code for nor takes apart.

    It would do so by itself, but where the variable CI is set it refuses those that its developers could take apart.
    """
    if isinstance(op, torch._ops.OpOverload) and op not in lowerings:
        make_fallback(op, tag_to_layout_constraint(get_layout_constraint_tag(op)), warn=False)


def _ask_who_was_chosen(
    gradient: torch.Tensor,
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    """The backward pass of a max pooling whose windows tile the image: each element asks whether it was chosen.

    PyTorch's kernel writes zeros everywhere and then scatters; this writes once, and fuses with its neighbours.
    """
    (high, wide), (height, width) = kernel, x.shape[-2:]
    tiles = list(stride or kernel) == list(kernel) and height % high == 0 and width % wide == 0
    if not tiles or any(padding) or any(step != 1 for step in dilation):
        return NotImplemented
    if not x.is_contiguous(memory_format=torch.channels_last):
        return NotImplemented
    gradient, indices = gradient.movedim(1, -1), indices.movedim(1, -1)  # in the order of memory: channels innermost
    indices = _computed_first(indices.to(torch.int32))  # 64-bit comparisons do not vectorise well
    row = torch.arange(height, dtype=torch.int32).view(-1, high, 1, 1, 1)
    column = torch.arange(width, dtype=torch.int32).view(-1, wide, 1)
    is_chosen = indices[:, :, None, :, None] == row * width + column
    windows = _computed_first(torch.where(is_chosen, gradient[:, :, None, :, None], 0.0))
    return windows.reshape(len(x), height, width, -1).movedim(-1, 1)


def _multiply_columns(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The backward pass of a wide convolution over small images: the weights' gradient as one matrix product.

    Each row of the matrix is what the kernel sees at one place. oneDNN keeps such gradients in an order of its own,
    which it has to bring them back from; the product has the order of channels-last weights right away.
    """
    places, columns = gradient.numel() // gradient.shape[1], weight.numel() // len(weight)
    narrow = min(weight.shape[:2]) < _WIDE
    if output_mask[1:] != [True, False] or transposed or groups > 1 or narrow or places * columns > _MANY_COLUMNS:
        return NotImplemented
    if weight.dim() != 4 or not weight.is_contiguous(memory_format=torch.channels_last):
        return NotImplemented
    channels_out, channels, high, wide = weight.shape
    (down, right), (top, left) = dilation, padding
    padded = _computed_first(F.pad(x.movedim(1, -1), (0, 0, left, left, top, top)).contiguous())
    seen = padded.unfold(1, (high - 1) * down + 1, stride[0]).unfold(2, (wide - 1) * right + 1, stride[1])
    matrix = seen[..., ::down, ::right].movedim(3, -1).reshape(places, columns)
    product = gradient.movedim(1, -1).reshape(places, channels_out).t() @ matrix
    of_weight = product.view(channels_out, high, wide, channels).movedim(-1, 1)
    of_x = None
    if output_mask[0]:
        rest = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups, [True, False, False])
        of_x = aten.convolution_backward(gradient, x, weight, *rest)[0]
    return of_x, of_weight, None


def _compare_labels_with_others(
    scores: torch.Tensor, labels: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The multilabel margin loss; PyTorch 2.13 takes it apart so that it counts labels that a row does not have."""
    rows, listed = torch.atleast_2d(scores), torch.atleast_2d(labels)
    is_label = (listed == -1).cumsum(-1) == 0  # a row's list ends at the first -1
    chosen = torch.where(is_label, listed, 0)
    classes = torch.arange(rows.shape[-1])
    is_target = (is_label.unsqueeze(-1) & (chosen.unsqueeze(-1) == classes)).any(1)
    margins = (1.0 - rows.gather(-1, chosen).unsqueeze(-1) + rows.unsqueeze(1)).clamp_min(0.0)
    counted = is_label.unsqueeze(-1) & ~is_target.unsqueeze(1)
    losses = torch.where(counted, margins, 0.0).sum((1, 2)) / rows.shape[-1]
    if reduction == _NONE:
        losses = losses.reshape(scores.shape[:-1])
    else:
        losses = losses.mean() if reduction == _MEAN else losses.sum()
    return losses, is_target.to(scores.dtype).reshape(labels.shape)


def _computed_first(values: torch.Tensor) -> torch.Tensor:
    """The same values, in a loop over exactly these dimensions; fused into a reader they would cost it divisions."""
    return inductor_prims.force_stride_order(values, values.stride())


def _is_channel_sum(node: fx.Node) -> bool:
    """Whether a node sums up all but the channels of images; Inductor would walk over them once per eight channels."""
    if node.target is not aten.sum.dim_IntList or node.args[1:] != ([0, 2, 3],):
        return False
    images: torch.Tensor = node.all_input_nodes[0].meta["val"]
    return images.dim() == 4 and images.numel() > _FEW_ELEMENTS
