"""Structures as plain data, which JSON can hold, and back.

Types are written by name. Reading never imports a module and runs no constructor but those of plain containers: a type
that the process does not know, or that does more than hold its children, comes back as a plain container of its kind.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any, cast

import torch

from poptorch.structure.nested import Constant, Custom, Leaf, Node, Structure

Data = Any  # what JSON can hold
_DEEPEST = 100


class Record:
    """An object with attributes, in place of one whose class this process does not know."""

    def __repr__(self) -> str:
        return f"Record({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


# ---- to data


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
        "holds": _way_to_hold(structure),
        "fields": list(getattr(structure.kind, "_fields", ())) if issubclass(structure.kind, tuple) else [],
        "keys": [value_data(key) for key in structure.keys],
        "children": [structure_data(child) for child in structure.children],
    }


def _way_to_hold(structure: Node) -> str:
    if structure.is_mapping:
        return "items"
    if structure.has_attributes:
        return "attributes"
    return "list" if issubclass(structure.kind, list) else "tuple"


def value_data(value: object) -> Data:
    """A plain value as data; anything else as the name of its type."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is complex:
        return {"complex": [value_data(value.real), value_data(value.imag)]}
    if type(value) is dict:
        return {"dict": [[value_data(key), value_data(item)] for key, item in cast("dict[Any, Any]", value).items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [value_data(item) for item in cast("list[object]", value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return {"type": type_name(type(value))}


def type_name(kind: type) -> str:
    """By which module and name a type is imported."""
    return f"{kind.__module__}.{kind.__qualname__}"


def unknown_types(data: Data) -> Iterator[str]:
    """The types of which the data of a structure have no more than the name, so that it cannot be read back."""
    if isinstance(data, list):
        for item in cast("list[Data]", data):
            yield from unknown_types(item)
    elif isinstance(data, dict):
        named = cast("dict[str, Data]", data)
        yield from (named[key] for key in ("type", "custom") if key in named)
        for key in ("value", "keys", "children", "dict", "list", "tuple"):
            yield from unknown_types(named.get(key))


# ---- from data


def structure_from(data: Data, depth: int = 0) -> Structure:
    """The structure that data describe; `ValueError` and its like if they describe none."""
    if depth > _DEEPEST:
        raise ValueError("a structure is nested too deeply")
    if "tensor" in data:
        return Leaf(_integer(data["tensor"]))
    if "value" in data:
        return Constant(value_from(data["value"]))
    keys = tuple(value_from(key) for key in data["keys"])
    children = tuple(structure_from(child, depth + 1) for child in data["children"])
    if len(keys) != len(children):
        raise ValueError(f"{len(keys)} keys for {len(children)} children")
    if data["holds"] in ("items", "attributes") and not all(isinstance(key, (str, int)) for key in keys):
        raise ValueError("a key is neither a text nor a number")
    return Node(_kind(data, len(keys)), keys, children)


def _kind(data: Data, count: int) -> type:
    """The type of a container: the one of this name if the process knows it and it is harmless, or a plain one."""
    holds, fields = data["holds"], [str(name) for name in data["fields"]]
    found = _find(str(data["kind"]))
    if holds == "items":
        return found if found in (dict, OrderedDict) or (_is(found, dict) and is_dataclass(found)) else dict  # pyright: ignore
    if holds == "attributes":
        return found if found is not None and is_dataclass(found) else Record
    if holds == "list":
        return list
    if holds != "tuple":
        raise ValueError(f"{holds!r} is no way to hold something")
    if fields:
        if len(fields) != count:
            raise ValueError(f"a named tuple of {len(fields)} fields with {count} items")
        is_same = _is(found, tuple) and list(getattr(found, "_fields", ())) == fields
        return cast("type", found if is_same else namedtuple("Record", fields))
    is_torchs = _is(found, tuple) and cast("type", found).__module__ == "torch.return_types"
    return cast("type", found) if is_torchs else tuple


def _find(name: str) -> type | None:
    """A type of a module that was imported already."""
    module, _, qualified = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, outer = module.rpartition(".")
        qualified = f"{outer}.{qualified}"
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


def _is(kind: type | None, of: type) -> bool:
    return kind is not None and issubclass(kind, of)


def value_from(data: Data, depth: int = 0) -> Any:
    """The plain value that data describe."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if depth > _DEEPEST:
        raise ValueError("a value is nested too deeply")
    ((kind, value),) = data.items()
    if kind in ("list", "tuple"):
        items = [value_from(item, depth + 1) for item in cast("Sequence[Data]", value)]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {value_from(key, depth + 1): value_from(item, depth + 1) for key, item in value}
    if kind == "float":
        return float(value)
    if kind == "complex":
        return complex(*(value_from(part, depth + 1) for part in value))
    if kind == "dtype":
        return _dtype(value)
    raise ValueError(f"a value of type {value!r} is not part of the data")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return found


def _integer(value: Data) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no index")
    return value
