"""Tensors as a part of a container, in the format of safetensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load, save

from poptorch.errors import FileError

_COMPLEX = "complex:"  # before the name of a tensor that is kept as pairs of real numbers


def tensors_part(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Values, shapes and types of tensors; memory that they share is written for each of them."""
    return save(dict(map(_plain, tensors.items())))


def _plain(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    name, tensor = item
    value = tensor.detach().resolve_conj().resolve_neg().cpu()
    if value.is_complex():
        name, value = f"{_COMPLEX}{name}", torch.view_as_real(value)
    return name, value.clone(memory_format=torch.contiguous_format)


def tensors_from(part: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a part; `FileError` if it holds something else."""
    try:
        found = load(part)
    except Exception as error:  # of safetensors, which has its own
        raise FileError(f"a part with tensors cannot be read: {error}") from error
    return dict(map(_from_plain, found.items()))


def _from_plain(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    name, value = item
    if not name.startswith(_COMPLEX):
        return name, value
    return name.removeprefix(_COMPLEX), torch.view_as_complex(value)
