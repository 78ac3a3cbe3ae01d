"""Weights in the order in which oneDNN's kernels read them.

A convolution or recurrent layer brings its weights into that order before it computes, in every call. Where weights
stay the same from call to call, doing it once is enough; for one image it takes as long as the convolution itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten, mkldnn = torch.ops.aten, torch.ops.mkldnn
_IMAGE_DIMS = (4, 5)


@dataclass(frozen=True)
class Packing:
    """Inputs that a program expects in another form, and what brings them into it."""

    positions: tuple[int, ...]
    pack: Callable[..., Any]

    def apply(self, tensors: list[torch.Tensor]) -> None:
        """Replace the tensors at the positions."""
        packed = self.pack(*(tensors[position] for position in self.positions))
        for position, tensor in zip(self.positions, [packed] if torch.is_tensor(packed) else packed, strict=True):
            tensors[position] = tensor


def expect_packed(ops: fx.GraphModule, fixed: Collection[int]) -> list[Packing]:
    """Let ops take packed weights where those are inputs at `fixed` positions, which nobody changes between calls."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return []
    placeholders = [node for node in ops.graph.nodes if node.op == "placeholder"]
    positions = {node: i for i, node in enumerate(placeholders) if i in fixed and len(node.users) == 1}
    found: list[Packing] = []
    for node in list(ops.graph.nodes):
        if node.target is aten.convolution.default and _is_packable_convolution(node, positions):
            found.append(_pack_convolution(node, positions))
        elif node.target is aten.mkldnn_rnn_layer.default and _is_packable_recurrent(node, positions):
            found.append(_pack_recurrent(node, positions))
    return found


def _is_packable_convolution(node: fx.Node, positions: Collection[fx.Node]) -> bool:
    images, weight, transposed = node.args[0], node.args[1], node.args[6]
    if transposed or weight not in positions:
        return False
    value: torch.Tensor = images.meta["val"]  # pyright: ignore
    return value.dtype is torch.float32 and value.dim() in _IMAGE_DIMS and value.numel() > 0


def _pack_convolution(node: fx.Node, positions: dict[fx.Node, int]) -> Packing:
    images, weight, bias, stride, padding, dilation, _, _, groups = node.args
    shape = list(images.meta["val"].shape)  # pyright: ignore
    packed = (images, weight, bias, padding, stride, dilation, groups, "none", [], "")  # and nothing after it
    with node.graph.inserting_before(node):
        replacement = node.graph.call_function(mkldnn._convolution_pointwise.default, packed)
    replacement.meta = dict(node.meta)
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)

    def pack(plain: torch.Tensor) -> torch.Tensor:
        return mkldnn._reorder_convolution_weight(plain, padding, stride, dilation, groups, shape)

    return Packing((positions[weight],), pack)  # pyright: ignore


def _is_packable_recurrent(node: fx.Node, positions: Collection[fx.Node]) -> bool:
    sequence, of_input, of_hidden = node.args[:3]
    keeps_work_for_backward = node.args[15]
    is_float = sequence.meta["val"].dtype is torch.float32  # pyright: ignore
    return is_float and not keeps_work_for_backward and of_input in positions and of_hidden in positions


def _pack_recurrent(node: fx.Node, positions: dict[fx.Node, int]) -> Packing:
    """The layer itself takes either form of weights."""
    sequence, of_input, of_hidden = node.args[:3]
    reverse, _, _, hidden, _, has_biases, _, batch_first, _ = node.args[7:]
    shape = list(sequence.meta["val"].shape)  # pyright: ignore

    def pack(of_input: torch.Tensor, of_hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        reorder = mkldnn._reorder_mkldnn_rnn_layer_weight.default
        return reorder(of_input, of_hidden, hidden, reverse, has_biases, batch_first, shape)

    return Packing((positions[of_input], positions[of_hidden]), pack)  # pyright: ignore
