"""What one call of an executable takes and gives back: names, nesting, shapes and types."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poptorch.ir import tensor_type
from poptorch.structure import Structure


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: how they are nested, and each tensor among them."""

    names: tuple[str, ...]  # of positional arguments
    args: Structure
    kwargs: Structure
    tensor_names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        tensors = zip(self.tensor_names, self.dtypes, self.shapes, strict=True)
        return f"({', '.join(f'{name}: {tensor_type(dtype, tuple(shape))}' for name, dtype, shape in tensors)})"


@dataclass(frozen=True)
class Interface:
    """What a call looks like from outside."""

    arguments: Arguments
    result: Structure
    inputs: tuple[str, ...] = ()  # of programs, which take the tensors of the arguments
