"""Structures as plain data, which JSON can hold."""

from __future__ import annotations

import math
from typing import Any, cast

from poptorch.structure.nested import Constant, Custom, Leaf, Structure

Data = Any  # what JSON can hold


def structure_data(structure: Structure) -> Data:
    """A structure as data. Of a value that data cannot hold there is only the type."""
    if isinstance(structure, Leaf):
        return {"tensor": structure.index}
    if isinstance(structure, Constant):
        return {"value": value_data(structure.value)}
    if isinstance(structure, Custom):
        return {"custom": type_name(type(structure.example)), "tensors": [structure_data(s) for s in structure.leaves]}
    return {
        "kind": type_name(structure.kind),
        "keys": [value_data(key) for key in structure.keys],
        "children": [structure_data(child) for child in structure.children],
    }


def value_data(value: object) -> Data:
    """A plain value as data; anything else as the name of its type."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [value_data(item) for item in cast("list[object]", value)]}
    return {"type": type_name(type(value))}


def type_name(kind: type) -> str:
    """By which module and name a type is imported."""
    return f"{kind.__module__}.{kind.__qualname__}"
