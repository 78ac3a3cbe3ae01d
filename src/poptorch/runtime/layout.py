"""Memory layouts that make native code faster: convolutions run best on channels-last tensors."""

from __future__ import annotations

from collections.abc import Collection

import torch

from poptorch.executable import Program

aten = torch.ops.aten
_BOUND_TO_STRIDES = frozenset({aten.as_strided.default, aten.as_strided_scatter.default})
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last_strides(program: Program, fixed: Collection[str]) -> dict[str, tuple[int, ...]]:
    """New strides for the weights of convolutions and for everything that is updated together with them.

    `fixed` names the state that an earlier program of the same executable has laid out so.
    """
    weights = _convolution_weights(program) | {name.partition(":")[0] for name in fixed}
    strides: dict[str, tuple[int, ...]] = {}
    for spec in program.state:
        if spec.owner in weights and len(spec.shape) in _FORMATS:
            like = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            strides[spec.name] = tuple(like.to(memory_format=_FORMATS[len(spec.shape)]).stride())
    return strides


def _convolution_weights(program: Program) -> set[str]:
    placeholders = dict(zip(program.graph.placeholders, program.signature.inputs, strict=True))
    weights: set[str] = set()
    for node in program.graph.ops.nodes:
        if node.target in _BOUND_TO_STRIDES:
            return set()
        if node.target is aten.convolution.default:
            owner = node.args[1]
            if owner in placeholders:
                weights.add(placeholders[owner].name)
    return weights


def with_stride(tensor: torch.Tensor, stride: tuple[int, ...], *, always_copy: bool = False) -> torch.Tensor:
    """The values of a tensor in another memory layout; the tensor itself if it has that layout already."""
    if tensor.stride() == stride and not always_copy:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
