"""Nested Python values and their flat tensors: take apart, put together, compare.

A `Layout` remembers the shape of a nested value with its tensors taken out; everything that is not a tensor or a known
container is a constant of the layout. Types of the user join in through `registerCustomArgParser`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from poptorch.errors import Error


class ICustomArgParser(ABC):
    """Teaches PopTorch to pass objects of a type of yours in and out of a model."""

    @abstractmethod
    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yield every tensor of `struct`, always in the same order."""

    @abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Make a new object like `original_structure`, taking its tensors from the iterator in that order."""


class CustomTypes:
    """The types that users registered, looked up by exact type first and by `isinstance` second."""

    def __init__(self) -> None:
        self._parsers: dict[type, ICustomArgParser] = {}

    def register(self, kind: type, parser: ICustomArgParser | None) -> None:
        if parser is None:
            self._parsers.pop(kind, None)
        else:
            self._parsers[kind] = parser

    def registered(self) -> dict[type, ICustomArgParser]:
        """A copy of the whole table, in the order of registration."""
        return dict(self._parsers)

    def find(self, value: object) -> ICustomArgParser | None:
        exact = self._parsers.get(type(value))
        if exact is not None:
            return exact
        return next((parser for kind, parser in self._parsers.items() if isinstance(value, kind)), None)


CUSTOM_TYPES = CustomTypes()


def registerCustomArgParser(arg_data_type: type, parser: ICustomArgParser | None) -> None:
    """Let objects of a type be arguments and results of models; `None` takes the parser of a type away again."""
    if parser is not None and not isinstance(parser, ICustomArgParser):  # pyright: ignore
        raise Error(f"a parser derives from poptorch.ICustomArgParser; {type(parser).__name__} does not.")
    CUSTOM_TYPES.register(arg_data_type, parser)


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
    """A container: its type, the keys of its children (positions or dictionary keys), and the children."""

    kind: type
    keys: tuple[Any, ...]
    children: tuple[Layout, ...]

    @property
    def is_mapping(self) -> bool:
        return issubclass(self.kind, dict)


@dataclass(frozen=True)
class Custom:
    """An object of a registered type, with the example it is rebuilt from and the places of its tensors."""

    example: Any
    leaves: tuple[Layout, ...]


Layout = Leaf | Constant | Node | Custom


def flatten(value: Any) -> tuple[Layout, list[torch.Tensor]]:
    """Take the tensors out of a nested value, depth first; the same tensor may appear twice."""
    tensors: list[torch.Tensor] = []
    return _flatten(value, tensors), tensors


def _flatten(value: Any, tensors: list[torch.Tensor]) -> Layout:
    def leaf(tensor: torch.Tensor) -> Leaf:
        tensors.append(tensor)
        return Leaf(len(tensors) - 1)

    if isinstance(value, torch.Tensor):
        return leaf(value)
    parser = CUSTOM_TYPES.find(value)
    if parser is not None:
        return Custom(value, tuple(leaf(tensor) for tensor in parser.yieldTensors(value)))
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value)
        return Node(type(items), tuple(items), tuple(_flatten(item, tensors) for item in items.values()))
    if isinstance(value, (list, tuple)):
        sequence = cast("Sequence[Any]", value)
        return Node(type(sequence), tuple(range(len(sequence))), tuple(_flatten(item, tensors) for item in sequence))
    return Constant(value)


def flatten_like(layout: Layout, value: Any) -> list[torch.Tensor]:
    """The tensors of `value` in the order of `layout`, whatever order its dictionaries have."""
    if isinstance(layout, Leaf):
        return [value]
    if isinstance(layout, Node):
        return [
            t for key, child in zip(layout.keys, layout.children, strict=True) for t in flatten_like(child, value[key])
        ]
    if isinstance(layout, Custom):
        parser = CUSTOM_TYPES.find(value)
        return list(parser.yieldTensors(value)) if parser is not None else []
    return []


def rebuild(layout: Layout, tensors: Sequence[Any]) -> Any:
    """Put a nested value together from its layout and the tensors that go into its leaves."""
    if isinstance(layout, Leaf):
        return tensors[layout.index]
    if isinstance(layout, Constant):
        return layout.value
    if isinstance(layout, Custom):
        parser = CUSTOM_TYPES.find(layout.example)
        assert parser is not None, f"the parser of {type(layout.example).__name__} is gone"
        return parser.reconstruct(layout.example, iter([rebuild(leaf, tensors) for leaf in layout.leaves]))
    children = [rebuild(child, tensors) for child in layout.children]
    if layout.is_mapping:
        return _rebuild_mapping(layout.kind, dict(zip(layout.keys, children, strict=True)))
    if hasattr(layout.kind, "_fields"):  # a named tuple takes its fields one by one
        return layout.kind(*children)
    return layout.kind(children)


def _rebuild_mapping(kind: type, items: dict[Any, Any]) -> Any:
    if kind is dict:
        return items
    try:
        return kind(items)
    except TypeError:  # such as defaultdict, or a dataclass-like dictionary that takes keywords
        try:
            return kind(**items)
        except TypeError:
            empty = kind()
            empty.update(items)
            return empty


def leaf_names(layout: Layout, name: str) -> list[str]:
    """A readable name for each tensor, for example `batch[0]` or `batch[mask]`."""
    if isinstance(layout, Leaf):
        return [name]
    if isinstance(layout, Node):
        pairs = zip(layout.keys, layout.children, strict=True)
        return [leaf for key, child in pairs for leaf in leaf_names(child, f"{name}[{key}]")]
    if isinstance(layout, Custom):
        return [f"{name}.{index}" for index in range(len(layout.leaves))]
    return []


def constants(layout: Layout) -> Iterator[Any]:
    """Every value in a layout that is neither a tensor nor a known container."""
    if isinstance(layout, Constant):
        yield layout.value
    elif isinstance(layout, Node):
        for child in layout.children:
            yield from constants(child)


def map_leaves(layout: Layout, function: Callable[[int], Layout]) -> Layout:
    """The same layout with each leaf replaced by `function(index)`."""
    if isinstance(layout, Leaf):
        return function(layout.index)
    if isinstance(layout, Node):
        return Node(layout.kind, layout.keys, tuple(map_leaves(child, function) for child in layout.children))
    if isinstance(layout, Custom):
        return Custom(layout.example, tuple(map_leaves(leaf, function) for leaf in layout.leaves))
    return layout
