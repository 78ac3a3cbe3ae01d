"""Views: which part of one tensor another one is."""

from __future__ import annotations

import torch

from poptorch.capture.private import neg_view


def same_view(tensor: torch.Tensor, owner: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor | None:
    """The part of the stand-in that `tensor` is of its owner; None if it shows anything else as well.

    The stand-in lies at the start of its memory, wherever the owner does.
    """
    if stand_in.requires_grad and not _is_differentiable_view(tensor):
        stand_in = stand_in.detach()
    if owner.is_complex() and tensor.dtype == owner.dtype.to_real():
        owner, stand_in = torch.view_as_real(owner.detach().resolve_conj()), torch.view_as_real(stand_in)
    elif tensor.is_complex() and owner.dtype == tensor.dtype.to_real() and _holds_pairs(owner):
        owner, stand_in = torch.view_as_complex(owner.detach()), torch.view_as_complex(stand_in)
    if tensor.dtype != owner.dtype or owner.is_conj() or owner.is_neg():
        return None
    start = tensor.storage_offset() - owner.storage_offset()
    if start < 0 or start + _span(tensor) > _span(owner):
        return None
    if (start, tensor.shape, tensor.stride()) != (0, owner.shape, owner.stride()):
        if stand_in.stride() != owner.stride():
            return None
        stand_in = stand_in.as_strided(tensor.shape, tensor.stride(), start)
    if tensor.is_conj():
        stand_in = stand_in.conj()
    return neg_view(stand_in) if tensor.is_neg() else stand_in


def _is_differentiable_view(tensor: torch.Tensor) -> bool:
    """Whether PyTorch would take gradients of a view back to the owner."""
    return tensor.requires_grad and not tensor.is_leaf and tensor._is_view()


def _holds_pairs(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be seen as complex numbers."""
    *others, last = tensor.stride() or (0,)
    return tensor.shape[-1:] == (2,) and last == 1 and all(stride % 2 == 0 for stride in others)


def at_start(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of the same strides if it lies somewhere inside its memory."""
    if tensor.layout is not torch.strided or not tensor.storage_offset():
        return tensor
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return tensor.as_strided((_span(tensor),), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors use the same bytes, judged by the range that each spans."""
    if a.is_meta or b.is_meta:  # which have no bytes
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or not (a.numel() and b.numel()):
        return False
    first, second = sorted((a, b), key=lambda t: t.data_ptr())
    return second.data_ptr() < first.data_ptr() + _span(first) * first.element_size()


def _span(tensor: torch.Tensor) -> int:
    """How many elements of memory lie between the first and the last of a tensor, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
