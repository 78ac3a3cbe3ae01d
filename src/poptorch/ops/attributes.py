"""The attributes of custom ops: numbers, texts, and lists of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from poptorch.errors import AttributeValueError, CompileError, explain

Scalar: TypeAlias = float | int | str
Attributes: TypeAlias = dict[str, Scalar | list[float] | list[int] | list[str]]
_KINDS = (float, int, str)
_FLOATS = torch.finfo(torch.float32)
_INTEGERS = torch.iinfo(torch.int64)


def checked(attributes: Mapping[Any, Any] | None) -> Attributes:
    """Attributes as ops get them, with lists in place of tuples; raises for what a device could not take."""
    found: Attributes = {}
    for name, value in (attributes or {}).items():
        if not isinstance(name, str):
            raise AttributeValueError(f"the name of an attribute is a text, not {name!r}.")
        _check_text(f"the name {name!r} of an attribute", name)
        found[name] = _checked_list(name, value) if isinstance(value, (list, tuple)) else _checked_item(name, value)
    return found


def _checked_list(name: str, values: Sequence[Any]) -> Any:
    items = [_checked_item(name, value) for value in values]
    kinds = sorted({type(item).__name__ for item in items})
    if len(kinds) > 1:
        raise AttributeValueError(
            explain(
                f"attribute {name!r} is a list that mixes {' and '.join(kinds)}: {list(values)!r}.",
                fix="give all items one type, for example float",
            )
        )
    return items


def _checked_item(name: str, value: Any) -> Scalar:
    if not isinstance(value, _KINDS):
        raise AttributeValueError(
            explain(
                f"attribute {name!r} is {value!r} of type {type(value).__name__}.",
                fix="give a float, an int, a str, or a list of one of these",
            )
        )
    if isinstance(value, str):
        _check_text(f"attribute {name!r}, which is {value!r},", value)
        return str(value)
    if isinstance(value, float):
        _check_range(name, value, f"{value:g}", _FLOATS.min, _FLOATS.max, "float")
        return float(value)
    _check_range(name, value, str(int(value)), _INTEGERS.min, _INTEGERS.max, "64-bit integer")
    return int(value)


def _check_text(what: str, text: str) -> None:
    if not text.isascii():
        raise AttributeValueError(f"{what} contains non-ASCII characters.")


def _check_range(name: str, value: float, shown: str, low: float, high: float, kind: str) -> None:
    if value < low or value > high:
        direction = "low" if value < low else "high"
        raise CompileError(
            explain(
                f"attribute {name!r} is {shown}, which is too {direction} for a {kind} attribute.",
                fix=f"stay between {low:g} and {high:g}",
            )
        )
