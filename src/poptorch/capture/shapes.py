"""Know what the results of an op look like without asking PyTorch a second time.

A deep model calls the same ops on tensors of the same kinds over and over, and PyTorch takes longer to work out the
shape, the type and the strides of each result than everything else in a trace together. So they are remembered for as
long as one trace lasts: of ops that give new tensors or a view of their first operand, depending on nothing but their
arguments. What is remembered was PyTorch's own answer, and is used only if it can be reproduced to the last detail.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from poptorch.capture.private import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    disable_torch_dispatch,
    dispatch_keys,
    fake_like,
    pytree,
)

aten = torch.ops.aten
Op = OpOverload
Key = tuple[Any, ...]
Layout = tuple[torch.Size, tuple[int, ...], int, torch.dtype]  # shape, strides, offset in its memory, type


class Kind(Enum):
    """How the results of an op relate to its arguments."""

    NEW = auto()  # tensors with memory of their own
    VIEW = auto()  # one tensor that shows the memory of the first argument
    OTHER = auto()  # anything else: nothing is remembered


@dataclass(frozen=True)
class Results:
    """What an op gives for arguments of certain kinds."""

    layouts: tuple[Layout | None, ...]
    container: type[Any] | None  # a tuple or a list of several results
    is_view: bool
    is_fake: bool  # whether they are fake tensors, or plain ones of the meta device


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_UNFIT = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
        torch.Tag.nondeterministic_seeded,
    }
)


@functools.cache
def kind_of(func: Op | HigherOrderOperator) -> Kind:
    """What may be remembered about an op, as its declaration says."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or not _UNFIT.isdisjoint(func.tags):
        return Kind.OTHER
    schema = func._schema
    if schema.is_mutable or schema.name.startswith("aten::lift"):
        return Kind.OTHER
    if func is aten._unsafe_view.default:
        return Kind.VIEW  # but does not say so
    first, *others = [each.alias_info is not None for each in (*schema.arguments, *schema.returns)] or [False]
    if not first and not any(others):
        return Kind.NEW
    shows_first = first and sum(others) == 1 and [str(each.type) for each in schema.returns] == ["Tensor"]
    return Kind.VIEW if func.is_view and shows_first else Kind.OTHER


class Shapes:
    """What is known about the ops of one trace, through which tensors of the mode `fake` flow or plain meta tensors."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._known: dict[Key, Results | None] = {}

    def compute(self, func: Op | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op gives for arguments that have no values."""
        key = self.key(func, args, kwargs)
        known = None if key is None else self._known.get(key)
        if known is not None:
            return self.make(known, args)
        result = func(*args, **kwargs)
        if key is not None and key not in self._known:
            self._known[key] = self._learn(kind_of(func), args, kwargs, result)
        return result

    def key(self, func: Op | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
        """All that the results of an op depend on; None if nothing is remembered about it."""
        if kind_of(func) is Kind.OTHER or torch.is_inference_mode_enabled():
            return None
        parts: list[Any] = [func, torch.get_default_dtype(), *kwargs]
        described = self._describe(args, parts) and self._describe(tuple(kwargs.values()), parts)
        return tuple(parts) if described else None

    def _describe(self, values: tuple[Any, ...] | list[Any], parts: list[Any]) -> bool:
        """Add what matters about some arguments; False if one is of a kind that is not known."""
        parts += (type(values), len(values))
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self._fake or value.constant is not None:
                    return False
                _describe_tensor(value, parts)
            elif kind in _PLAIN:
                parts += (kind, value)  # 1, 1.0 and True are equal
            elif kind is list or kind is tuple:
                if not self._describe(value, parts):
                    return False
            elif kind is torch.Tensor and value.is_meta:
                _describe_tensor(value, parts)
            else:
                return False
        return True

    def _learn(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Results | None:
        """What to remember about an op that has just given a result; None if that is more than its layout."""
        given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        container = type(result) if isinstance(result, (tuple, list)) else None
        items: tuple[Any, ...] = (result,) if container is None else tuple(result)
        tensors: list[Any] = [item for item in items if item is not None]
        if len({type(tensor) for tensor in (*given, *tensors)}) != 1 or not given or not tensors:
            return None
        memory = _memory(given)
        if kind is Kind.VIEW:
            shows_first = container is None and isinstance(args[0], torch.Tensor) and result is not args[0]
            if not shows_first or _memory([args[0]]) != _memory(tensors):
                return None
        elif len(memory | _memory(tensors)) != len(memory) + len(tensors):
            return None
        layouts = tuple(None if item is None else _layout(item) for item in items)
        known = Results(layouts, container, kind is Kind.VIEW, isinstance(given[0], FakeTensor))
        made: Any = self.make(known, args)
        same = all(map(_are_alike, (made,) if container is None else made, items))
        return known if same else None

    def results(self, key: Key) -> Results | None:
        """What an op gives for these arguments, if it is known."""
        return self._known.get(key)

    def make(self, known: Results, args: tuple[Any, ...]) -> Any:
        """The results of an op for these arguments."""
        if known.is_view:
            return self._tensor(known, known.layouts[0], args[0])
        if known.container is None:
            return self._tensor(known, known.layouts[0], None)
        return known.container([self._tensor(known, layout, None) for layout in known.layouts])

    def _tensor(self, known: Results, layout: Layout | None, shown: torch.Tensor | None) -> torch.Tensor | None:
        if layout is None:
            return None
        shape, stride, offset, dtype = layout
        with disable_torch_dispatch():
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if shown is not None:
                tensor.set_(shown.untyped_storage(), offset, shape, stride)
            return fake_like(self._fake, tensor) if known.is_fake else tensor


def _describe_tensor(tensor: torch.Tensor, parts: list[Any]) -> None:
    """The keys tell layout and device, and whether it is negated, conjugated, zero or of inference mode."""
    keys = dispatch_keys(tensor).raw_repr()
    parts += (type(tensor), *_layout(tensor), tensor.requires_grad, keys)


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype


def _memory(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _are_alike(made: torch.Tensor | None, given: torch.Tensor | None) -> bool:
    """Whether nobody can tell a result that was made from the one that the op has given."""
    if made is None or given is None:
        return made is given
    described: tuple[list[Any], list[Any]] = ([], [])
    for tensor, parts in zip((made, given), described, strict=True):
        _describe_tensor(tensor, parts)
        parts += (tensor.device, tensor.untyped_storage().nbytes(), tensor.is_inference(), tensor.__dict__)
    return described[0] == described[1]
