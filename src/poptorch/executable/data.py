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
from poptorch.ir.serial import graph_data
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
        return {"is": type(value).__name__, **shown}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, cast("Iterable[object]", value)))
    assert isinstance(value, (list, tuple)), f"{value!r} is no plain value"
    return [plain(item) for item in cast("Iterable[object]", value)]


def tensors_in(value: object, place: str = "") -> dict[str, torch.Tensor]:
    """The tensors inside nested frozen values, which are constants of graphs, each under the place where it is."""
    if isinstance(value, StepGraph):
        own = {f"{place}/{name}": tensor for name, tensor in value.constants.items()}
        return {**own, **_each(value.graphs.items(), place)}
    if isinstance(value, (list, tuple)):
        items = cast("Iterable[object]", value)
        return _each(((str(index), item) for index, item in enumerate(items)), place)
    if is_dataclass(value) and not isinstance(value, type):
        return _each(((field.name, getattr(value, field.name)) for field in fields(value)), place)
    return {}


def _each(items: Iterable[tuple[str, object]], place: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, item in items:
        found.update(tensors_in(item, f"{place}/{name}"))
    return found
