"""Find tensors inside objects of types that nobody has told us about."""

from __future__ import annotations

from collections import deque
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, cast

import torch

_OPAQUE = (type, str, bytes, int, float, complex, torch.nn.Module, ModuleType, FunctionType, BuiltinFunctionType)
_DEEPEST = 4


def hidden_tensors(value: Any, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """The tensors inside an object of a type that structures do not know, a few attributes and items deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, _OPAQUE):
        for item in _inside(value):
            yield from hidden_tensors(item, depth - 1)


def _inside(value: Any) -> list[Any]:
    """The items of a container and the attributes of an object."""
    items: list[Any] = []
    if isinstance(value, Mapping):
        items += cast("Mapping[Any, Any]", value).values()
    elif isinstance(value, (list, tuple, set, frozenset, deque, ValuesView, ItemsView)):
        items += cast("Sequence[Any]", value)
    elif isinstance(value, partial):
        call = cast("partial[Any]", value)
        items += [*call.args, call.keywords]
    holder = cast("Any", value)
    items += getattr(holder, "__dict__", {}).values()
    slots = [name for kind in type(holder).__mro__ for name in _slots(kind)]
    return items + [getattr(holder, name) for name in slots if hasattr(holder, name)]


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]
