"""What a value of a step becomes when n micro-batches of it are computed side by side.

SHARED    the same tensor for all of them, such as a weight;
FOLDED    one tensor in which a dimension is n times as long: micro-batch 0 comes first, then 1, and so on;
STACKED   one tensor with a new first dimension of size n;
SUMMED    the sum over all micro-batches. Nobody needs the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import fx

from poptorch.ir import Direction, GraphBuilder, Note, fake_mode, value_of

aten = torch.ops.aten
NARROW_FLOATS = (torch.float16, torch.bfloat16)


class CannotWiden(Exception):
    """The micro-batches of this step cannot be computed side by side, for the reason given."""


class Kind(Enum):
    """How a tensor stands for the values of all micro-batches."""

    SHARED = auto()
    FOLDED = auto()
    STACKED = auto()
    SUMMED = auto()


@dataclass(frozen=True)
class Wide:
    """The values that one op of a step has in all micro-batches; each of them has the shape `shape`."""

    node: fx.Node
    kind: Kind
    shape: tuple[int, ...]
    dim: int = 0  # which dimension is folded

    @property
    def is_shared(self) -> bool:
        return self.kind is Kind.SHARED

    @property
    def dtype(self) -> torch.dtype:
        return value_of(self.node).dtype

    def is_folded(self, dim: int = 0) -> bool:
        return self.kind is Kind.FOLDED and self.dim == dim


Result = Any  # a Wide, or a tuple of them and None for an op with several results


class Writer:
    """Writes the wide graph: ops, and the changes of representation that they need."""

    def __init__(self, builder: GraphBuilder, width: int) -> None:
        self.builder, self.width = builder, width
        self.note = Note(Direction.FORWARD)
        self._known: dict[tuple[fx.Node, Kind, int], fx.Node] = {}

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.builder.call(self.note, op, *args, **kwargs)

    # ---- wide values from nodes of the wide graph

    def shared(self, node: fx.Node) -> Wide:
        value = value_of(node)
        return Wide(node, Kind.SHARED, tuple(value.shape) if isinstance(value, torch.Tensor) else ())

    def as_folded(self, node: fx.Node, dim: int = 0) -> Wide:
        shape = list(value_of(node).shape)
        shape[dim] //= self.width
        return Wide(node, Kind.FOLDED, tuple(shape), dim)

    def as_stacked(self, node: fx.Node) -> Wide:
        return Wide(node, Kind.STACKED, tuple(value_of(node).shape)[1:])

    def as_summed(self, node: fx.Node) -> Wide:
        return Wide(node, Kind.SUMMED, tuple(value_of(node).shape))

    def as_form(self, dim: int | None) -> Callable[[fx.Node], Wide]:
        """What makes wide values of nodes that are folded along a dimension, or stacked if there is none."""
        return self.as_stacked if dim is None else lambda node: self.as_folded(node, dim)

    # ---- other representations of the same values

    def stacked(self, wide: Wide) -> fx.Node:
        return self._once(wide, Kind.STACKED, 0, self._stack)

    def folded(self, wide: Wide, dim: int = 0) -> fx.Node:
        return self._once(wide, Kind.FOLDED, dim, lambda wide: self._fold(self.stacked(wide), dim))

    def summed(self, wide: Wide) -> fx.Node:
        return self._once(wide, Kind.SUMMED, 0, self._sum)

    def unstacked(self, wide: Wide, index: int) -> fx.Node:
        """The value of one micro-batch."""
        if wide.is_shared:
            return wide.node
        return self.call(aten.select.int, self.stacked(wide), 0, index)

    def returned(self, wide: Wide) -> fx.Node:
        """The values of all micro-batches one below the other, as a call returns them."""
        return self.folded(wide) if wide.shape else self.stacked(wide)

    def reshaped(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """A view where the memory layout allows that, otherwise a copy."""
        if list(value_of(node).shape) == list(shape):
            return node
        if not _can_view(value_of(node), shape):
            node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.call(aten.view.default, node, list(shape))

    def _once(self, wide: Wide, kind: Kind, dim: int, make: Callable[[Wide], fx.Node]) -> fx.Node:
        if wide.kind is kind and (kind is not Kind.FOLDED or wide.dim == dim):
            return wide.node
        key = (wide.node, kind, dim)
        if key not in self._known:
            self._known[key] = make(wide)
        return self._known[key]

    def _stack(self, wide: Wide) -> fx.Node:
        if wide.kind is Kind.SHARED:
            added = self.call(aten.unsqueeze.default, wide.node, 0)
            return self.call(aten.expand.default, added, [self.width, *wide.shape])
        assert wide.kind is Kind.FOLDED, "a sum cannot be taken apart"
        before, after = wide.shape[: wide.dim], wide.shape[wide.dim :]
        parts = self.call(aten.view.default, wide.node, [*before, self.width, *after])
        return self._moved(parts, wide.dim, 0)

    def _fold(self, stacked: fx.Node, dim: int) -> fx.Node:
        shape = list(value_of(stacked).shape[1:])
        assert shape, "a number per micro-batch has no dimension to fold"
        shape[dim] *= self.width
        return self.reshaped(self._moved(stacked, 0, dim), shape)

    def _moved(self, node: fx.Node, source: int, target: int) -> fx.Node:
        if source == target:
            return node
        order = list(range(value_of(node).dim()))
        order.insert(target, order.pop(source))
        return self.call(aten.permute.default, node, order)

    def _sum(self, wide: Wide) -> fx.Node:
        if wide.kind is Kind.SHARED:
            return self.call(aten.mul.Tensor, wide.node, self.width)
        wider = {"dtype": torch.float32} if wide.dtype in NARROW_FLOATS else {}
        return self.call(aten.sum.dim_IntList, self.stacked(wide), [0], **wider)


def _can_view(value: torch.Tensor, shape: Sequence[int]) -> bool:
    with fake_mode():
        try:
            value.view(list(shape))
        except (RuntimeError, ValueError):
            return False
    return True
