"""Which ops the inductor engine takes apart before it generates code, and which stay calls of PyTorch's kernels.

Inductor's own choice is right but for images on a CPU, where some of PyTorch's kernels are several times faster than
the loops that Inductor generates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims
from torch._inductor.decomposition import select_decomp_table

aten = torch.ops.aten
_MAX_POOL = aten.max_pool2d_with_indices.default
_MAX_POOL_BACKWARD = aten.max_pool2d_with_indices_backward.default
_FEW_ELEMENTS = 2**15  # a loop of our own costs less than a call of PyTorch


def decompositions() -> dict[Any, Callable[..., Any]]:
    """For each op that is taken apart, how."""
    table = dict(select_decomp_table())
    table.pop(_MAX_POOL, None)
    table[_MAX_POOL_BACKWARD] = _ask_who_was_chosen
    return table


def runs_in_pytorch(node: fx.Node) -> bool:
    """Whether Inductor must not generate code for an op that is left after decomposition."""
    return node.target in (_MAX_POOL, _MAX_POOL_BACKWARD) or _is_channel_sum(node)


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


def _computed_first(values: torch.Tensor) -> torch.Tensor:
    """The same values, in a loop over exactly these dimensions; fused into a reader they would cost it divisions."""
    return inductor_prims.force_stride_order(values, values.stride())


def _is_channel_sum(node: fx.Node) -> bool:
    """Whether a node sums up all but the channels of images; Inductor would walk over them once per eight channels."""
    if node.target is not aten.sum.dim_IntList or node.args[1:] != ([0, 2, 3],):
        return False
    images: torch.Tensor = node.all_input_nodes[0].meta["val"]
    return images.dim() == 4 and images.numel() > _FEW_ELEMENTS
