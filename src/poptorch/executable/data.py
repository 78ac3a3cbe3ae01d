"""An executable as plain data, of which a digest can be taken.

Lines of the user's program are left out: they say where something comes from, not what it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, cast

import torch

from poptorch.ir import SourceLine, StepGraph
from poptorch.ir.serial import graph_data, line_data, origin_data
from poptorch.structure import Constant, Custom, Leaf, Node, structure_data

Data = Any  # what JSON can hold


def plain(value: object) -> Data:
    """Nested frozen values as dictionaries, lists, texts and numbers."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, StepGraph):
        return graph_data(value)
    if isinstance(value, (Leaf, Constant, Node, Custom)):
        return structure_data(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        shown = {name: plain(item) for name, item in named.items() if not isinstance(item, SourceLine)}
        return {"is": declared_name(type(value)), **shown}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, cast("Iterable[object]", value)))
    assert isinstance(value, (list, tuple)), f"{value!r} is no plain value"
    return [plain(item) for item in cast("Iterable[object]", value)]


def declared_name(kind: type) -> str:
    """The name of the class that declares the fields: what derives from it only adds behaviour."""
    return next(base.__name__ for base in kind.__mro__ if "__dataclass_fields__" in vars(base))


def origins_in(value: object, place: str = "") -> dict[str, Data]:
    """Where the graphs and other things inside nested frozen values come from in the user's program, by place."""
    if isinstance(value, StepGraph):
        return {place: origin_data(value)}
    if isinstance(value, SourceLine):
        return {place: line_data(value)}
    found: dict[str, Data] = {}
    for name, item in _parts(value):
        found.update(origins_in(item, f"{place}/{name}"))
    return found


def tensors_in(value: object, place: str = "") -> dict[str, torch.Tensor]:
    """The tensors inside nested frozen values, which are constants of graphs, each under the place where it is."""
    found: dict[str, torch.Tensor] = {}
    if isinstance(value, StepGraph):
        found = {f"{place}/{name}": tensor for name, tensor in value.constants.items()}
    for name, item in _parts(value):
        found.update(tensors_in(item, f"{place}/{name}"))
    return found


def _parts(value: object) -> Iterable[tuple[str, object]]:
    """What is inside a frozen value, each under a name."""
    if isinstance(value, StepGraph):
        return value.graphs.items()
    if isinstance(value, (list, tuple)):
        items = cast("Iterable[object]", value)
        return ((str(index), item) for index, item in enumerate(items))
    if is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name)) for field in fields(value))
    return ()
