"""Nested values as Lightning passes them around: sequences, mappings and dataclasses, with anything else at the leaves.

Each leaf has a name that says where it is: `batch[0]`, `batch[mask]`, `batch.labels`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

Child = tuple[Any, str, Any]  # key, the end of its name, value


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every leaf with its name, depth first."""
    inner = _children(value)
    if inner is None:
        yield name, value
    else:
        for _, suffix, child in inner:
            yield from leaves(child, name + suffix)


def mapped(value: Any, function: Callable[[str, Any], Any], name: str = "") -> Any:
    """A nested value like this one with `function(name, leaf)` in place of each leaf."""
    inner = _children(value)
    if inner is None:
        return function(name, value)
    return _like(value, {key: mapped(child, function, name + suffix) for key, suffix, child in inner})


def parts(value: Any) -> list[Any]:
    """What lies directly inside; a leaf is its own only part."""
    inner = _children(value)
    return [value] if inner is None else [child for _, _, child in inner]


def _children(value: Any) -> list[Child] | None:
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [(index, f"[{index}]", child) for index, child in enumerate(value)]
    if isinstance(value, Mapping):
        return [(key, f"[{key}]", child) for key, child in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, f".{name}", getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def _like(value: Any, children: dict[Any, Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its fields one by one
        return type(value)(*children.values())
    if isinstance(value, (list, tuple)):
        return type(value)(children.values())
    if isinstance(value, Mapping):
        if type(value) is dict or not isinstance(value, MutableMapping):
            return children
        twin = copy.copy(value)
        twin.update(children)
        return twin
    twin = copy.copy(value)
    for name, child in children.items():
        object.__setattr__(twin, name, child)  # dataclasses may be frozen
    return twin
