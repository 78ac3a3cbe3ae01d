"""The slots of an accessor: equal places in shared memory, each with room for the tensors of one batch.

The first element decides the layout: which tensors a batch has, their shapes and types, and the structure around them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from poptorch.data.shared_file import SharedFile
from poptorch.errors import DataError, explain
from poptorch.structure import Constant, Custom, Node, Structure, flatten, flatten_like, leaf_names, rebuild

_ALIGNMENT = 64  # a cache line, and enough for every vector instruction


@dataclass(frozen=True)
class SlotLayout:
    """What one slot holds."""

    structure: Structure
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, element: Any, rows: int | None = None) -> SlotLayout:
        """For elements like this one, or for `rows` rows of them."""
        structure, tensors = flatten(element)
        structure = _as_delivered(structure)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if not shapes:
            raise DataError(f"an element without a tensor cannot be loaded: {element!r}")
        if rows is not None:
            if not all(shapes):
                raise DataError("batches of another size cannot be made from numbers without a batch dimension.")
            shapes = [(rows, *shape[1:]) for shape in shapes]
        return cls(structure, tuple(shapes), tuple(tensor.dtype for tensor in tensors))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [dtype.itemsize * math.prod(shape) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    @property
    def offsets(self) -> list[int]:
        """Where each tensor begins, and at last the size of the whole slot; first come the row counts."""
        rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in [8 * len(self.shapes), *self.sizes]]
        return list(itertools.accumulate(rounded))

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]

    def take_apart(self, element: Any) -> tuple[list[torch.Tensor], list[str]]:
        """The tensors of a later element of the same structure, in the types of the first; and which had another."""
        structure, _ = flatten(element)
        now, first = _outline(_as_delivered(structure)), _outline(self.structure)
        if now != first:
            raise DataError(f"an element has the structure {now}, but the first one of the data set had {first}.")
        tensors, converted = flatten_like(self.structure, element), list[str]()
        if any(tensor.dtype != dtype for tensor, dtype in zip(tensors, self.dtypes, strict=True)):
            names = leaf_names(self.structure, "element")
            for index, (name, tensor, dtype) in enumerate(zip(names, tensors, self.dtypes, strict=True)):
                if tensor.dtype != dtype:
                    what = f"{name} is of type {tensor.dtype}, but in the first element it was {dtype}"
                    converted.append(what)
                    tensors[index] = _converted(tensor, dtype, what)
        return tensors, converted

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """A batch for the user around these tensors."""
        return rebuild(self.structure, tensors)


class Slots:
    """All slots of an accessor, mapped into this process."""

    def __init__(self, layout: SlotLayout, count: int, memory: SharedFile) -> None:
        self.layout = layout
        whole = memory.as_tensor(self.nbytes(layout, count))
        places = [whole[start : start + layout.nbytes] for start in range(0, len(whole), layout.nbytes)]
        self._rows = [place[: 8 * len(layout.shapes)].view(torch.int64) for place in places]
        self._tensors = [self._views(place) for place in places]

    @staticmethod
    def nbytes(layout: SlotLayout, count: int) -> int:
        return count * layout.nbytes

    def _views(self, place: torch.Tensor) -> list[torch.Tensor]:
        layout = self.layout
        return [
            place[start : start + size].view(dtype).view(shape)
            for start, size, dtype, shape in zip(
                layout.offsets, layout.sizes, layout.dtypes, layout.shapes, strict=False
            )
        ]

    def write(self, slot: int, tensors: Sequence[torch.Tensor], row: int = 0) -> None:
        """Copy tensors into a slot, from this row on."""
        for place, tensor in zip(self._tensors[slot], tensors, strict=True):
            if place.shape == tensor.shape:
                place.copy_(tensor)
            else:
                _fitting_rows(place, tensor, row).copy_(tensor)

    def is_full(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors fill a slot completely."""
        return all(tuple(tensor.shape) == shape for tensor, shape in zip(tensors, self.layout.shapes, strict=True))

    def set_rows(self, slot: int, rows: Sequence[int]) -> None:
        """Note how many rows of each tensor are valid."""
        self._rows[slot].copy_(torch.tensor(rows))

    def batch(self, slot: int) -> Any:
        """The batch in a slot; its tensors are the slot's own memory."""
        return self.layout.build([tensor.detach() for tensor in self._tensors[slot]])

    def partial_batch(self, slot: int) -> Any:
        """The same, without the rows that are not valid."""
        rows = self._rows[slot].tolist()
        return self.layout.build(
            [t.detach().narrow(0, 0, n) if t.dim() else t for t, n in zip(self._tensors[slot], rows, strict=True)]
        )


def _converted(tensor: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """The same numbers in another type; rounding a fraction is all that may be lost."""
    if tensor.is_complex() and not dtype.is_complex:
        kept = bool((tensor.imag == 0).all())
        result = tensor.real.to(dtype)
    else:
        kept, result = True, tensor.to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        kept = kept and bool((result.to(tensor.dtype) == tensor).all())
    if not kept:
        raise DataError(
            explain(
                f"{what}, which cannot hold its values.",
                fix="let the data set give all its elements the same type",
            )
        )
    return result


def _fitting_rows(place: torch.Tensor, tensor: torch.Tensor, row: int) -> torch.Tensor:
    if place.dim() and place.shape[1:] == tensor.shape[1:] and row + len(tensor) <= len(place):
        return place.narrow(0, row, len(tensor))
    raise DataError(
        explain(
            f"an element has a tensor of shape {list(tensor.shape)}, "
            f"but the first element of the data set made the buffers for shape {list(place.shape)}.",
            fix="give all elements the same shape (only the first dimension may be smaller), for example by padding",
        )
    )


def _as_delivered(structure: Structure) -> Structure:
    """The structure as the user gets it back: tuples become lists. Anything that is not a tensor is refused."""
    if isinstance(structure, Constant):
        kind = type(structure.value).__name__
        raise DataError(
            explain(
                f"an element contains {structure.value!r} ({kind}), but only tensors can be loaded asynchronously.",
                fix="use a collate_fn that makes tensors of everything, or DataLoaderMode.Sync",
            )
        )
    if isinstance(structure, Node):
        kind = list if structure.kind is tuple else structure.kind
        return replace(structure, kind=kind, children=tuple(_as_delivered(child) for child in structure.children))
    return structure


def _outline(structure: Structure) -> Any:
    """Something to compare structures by: neither the order of keys nor the examples of custom types matter."""
    if isinstance(structure, Node):
        children = dict(zip(structure.keys, map(_outline, structure.children), strict=True))
        return {structure.kind.__name__: children if structure.is_mapping else list(children.values())}
    if isinstance(structure, Custom):
        return {type(structure.example).__name__: len(structure.leaves)}
    return "tensor"
