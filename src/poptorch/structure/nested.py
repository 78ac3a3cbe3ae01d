"""Nested Python values and their flat tensors: take apart, put together, compare.

A `Structure` is what remains of a nested value when its tensors are taken out; everything that is not a tensor or a
known container is a constant of it. Dataclasses that hold tensors are containers; other types of the user join in
through `registerCustomArgParser`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, cast

import torch

from poptorch.structure.custom import CUSTOM_TYPES


@dataclass(frozen=True)
class Leaf:
    """The place of one tensor."""

    index: int


@dataclass(frozen=True)
class Constant:
    """A value that is not a tensor; it is part of the program."""

    value: Any


@dataclass(frozen=True)
class Node:
    """A container: its type, the keys of its children (positions, dictionary keys or attributes), and the children.

    `default_factory` is that of a `defaultdict`; two of them are alike, whatever makes the values that they lack.
    """

    kind: type
    keys: tuple[Any, ...]
    children: tuple[Structure, ...]
    default_factory: Callable[[], Any] | None = field(default=None, compare=False)

    @cached_property
    def is_mapping(self) -> bool:
        return issubclass(self.kind, Mapping)

    @cached_property
    def has_attributes(self) -> bool:
        """Whether the children are attributes of a dataclass."""
        return not issubclass(self.kind, (Mapping, list, tuple))

    def items(self, value: Any) -> Mapping[Any, Any]:
        """The children of a value of this kind, by their keys."""
        if self.is_mapping:
            return value
        return _attributes(value) if self.has_attributes else dict(enumerate(cast("Sequence[Any]", value)))


@dataclass(frozen=True)
class Custom:
    """An object of a registered type, with the example it is rebuilt from and the places of its tensors."""

    example: Any
    leaves: tuple[Structure, ...]


Structure = Leaf | Constant | Node | Custom


def flatten(value: Any) -> tuple[Structure, list[torch.Tensor]]:
    """Take the tensors out of a nested value, depth first; the same tensor may appear twice."""
    tensors: list[torch.Tensor] = []
    return _flatten(value, tensors, ()), tensors


def _flatten(value: Any, tensors: list[torch.Tensor], inside: tuple[object, ...]) -> Structure:
    """The structure of a value that lies in the dataclasses `inside`; its tensors are appended."""

    def leaf(tensor: torch.Tensor) -> Leaf:
        tensors.append(tensor)
        return Leaf(len(tensors) - 1)

    if isinstance(value, torch.Tensor):
        return leaf(value)
    parser = CUSTOM_TYPES.find(value)
    if parser is not None:
        return Custom(value, tuple(leaf(tensor) for tensor in parser.yieldTensors(value)))
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        children = tuple(_flatten(item, tensors, inside) for item in items.values())
        return Node(type(items), tuple(items), children, _default_factory(items))
    if isinstance(value, (list, tuple)):
        sequence = cast("Sequence[Any]", value)
        children = tuple(_flatten(item, tensors, inside) for item in sequence)
        return Node(type(sequence), tuple(range(len(sequence))), children)
    if is_dataclass(value) and not isinstance(value, type) and not any(outer is value for outer in inside):
        count, attributes = len(tensors), _attributes(value)
        children = tuple(_flatten(item, tensors, (*inside, value)) for item in attributes.values())
        if len(tensors) > count:
            return Node(type(value), tuple(attributes), children)
    return Constant(value)


def _default_factory(items: Mapping[Any, Any]) -> Callable[[], Any] | None:
    return cast("Any", items.default_factory) if isinstance(items, defaultdict) else None


def _attributes(value: Any) -> dict[str, Any]:
    """Everything that an object of a dataclass holds, also in slots and beside its fields."""
    fields = [name for name in value.__dataclass_fields__ if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in fields}, **getattr(value, "__dict__", {})}


def flatten_like(structure: Structure, value: Any) -> list[torch.Tensor]:
    """The tensors of `value` in the order of `structure`, whatever order its dictionaries have."""
    if isinstance(structure, Leaf):
        return [value]
    if isinstance(structure, Node):
        items = structure.items(value)
        pairs = zip(structure.keys, structure.children, strict=True)
        return [tensor for key, child in pairs for tensor in flatten_like(child, items[key])]
    if isinstance(structure, Custom):
        return list(CUSTOM_TYPES.of(value).yieldTensors(value))
    return []


def builder(structure: Structure) -> Callable[[Sequence[Any]], Any]:
    """What puts a nested value together, as `rebuild` does; a tuple of tensors takes no Python."""
    if isinstance(structure, Node) and structure.kind is tuple and len(structure.children) > 1:
        places = [child.index for child in structure.children if isinstance(child, Leaf)]
        if len(places) == len(structure.children):
            return itemgetter(*places)
    return partial(rebuild, structure)


def rebuild(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Put a nested value together from its structure and the tensors that go into its leaves."""
    if isinstance(structure, Leaf):
        return tensors[structure.index]
    if isinstance(structure, Constant):
        return structure.value
    if isinstance(structure, Custom):
        leaves = iter([rebuild(leaf, tensors) for leaf in structure.leaves])
        return CUSTOM_TYPES.of(structure.example).reconstruct(structure.example, leaves)
    children = [rebuild(child, tensors) for child in structure.children]
    if structure.kind is tuple:
        return tuple(children)
    if structure.is_mapping:
        return _rebuild_mapping(structure, dict(zip(structure.keys, children, strict=True)))
    if structure.has_attributes:
        return _rebuild_object(structure.kind, dict(zip(structure.keys, children, strict=True)))
    if hasattr(structure.kind, "_fields"):  # a named tuple takes its fields one by one
        return structure.kind(*children)
    return structure.kind(children)


def _rebuild_object(kind: type, attributes: dict[str, Any]) -> Any:
    """An object with these attributes; its constructor has run for the one that it is like, and does not run again."""
    new = cast("Any", object.__new__(kind))
    for name, value in attributes.items():
        object.__setattr__(new, name, value)
    return new


def _rebuild_mapping(structure: Node, items: dict[Any, Any]) -> Any:
    if structure.kind is dict:
        return items
    new = _new_mapping(structure.kind, items)
    if isinstance(new, defaultdict):
        new.default_factory = structure.default_factory
    return new


def _new_mapping(kind: Any, items: dict[Any, Any]) -> Any:
    """A mapping of this type; its constructor may take a mapping, keywords, or something else."""
    for construct in (lambda: kind(items), lambda: kind(**items)):
        try:
            new = construct()
        except TypeError:  # such as defaultdict, or a dataclass-like dictionary that takes keywords
            continue
        if len(new) == len(items) and all(key in new for key in items):
            return new
    new = kind.__new__(kind) if issubclass(kind, dict) else kind()
    new.update(items)
    return new


def leaf_names(structure: Structure, name: str) -> list[str]:
    """A readable name for each tensor, for example `batch[0]`, `batch[mask]` or `batch.mask`."""
    if isinstance(structure, Leaf):
        return [name]
    if isinstance(structure, Node):
        pairs = zip(structure.keys, structure.children, strict=True)
        return [leaf for key, child in pairs for leaf in leaf_names(child, child_name(structure, name, key))]
    if isinstance(structure, Custom):
        return [f"{name}.{index}" for index in range(len(structure.leaves))]
    return []


def child_name(structure: Node, name: str, key: Any) -> str:
    """How to write down the child of a container that has this name."""
    return f"{name}.{key}" if structure.has_attributes else f"{name}[{key}]"


def constants(structure: Structure) -> Iterator[Any]:
    """Every value in a structure that is neither a tensor nor a known container."""
    if isinstance(structure, Constant):
        yield structure.value
    elif isinstance(structure, Node):
        for child in structure.children:
            yield from constants(child)


def map_leaves(structure: Structure, function: Callable[[int], Structure]) -> Structure:
    """The same structure with each leaf replaced by `function(index)`."""
    if isinstance(structure, Leaf):
        return function(structure.index)
    if isinstance(structure, Node):
        return replace(structure, children=tuple(map_leaves(child, function) for child in structure.children))
    if isinstance(structure, Custom):
        return Custom(structure.example, tuple(map_leaves(leaf, function) for leaf in structure.leaves))
    return structure
