"""Checks of what users pass to loaders; each gives the value in its plain form or raises `DataError`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from enum import Enum
from numbers import Integral, Real
from typing import Any, TypeVar

from poptorch.errors import DataError, nearest

E = TypeVar("E", bound=Enum)


def whole_number(name: str, value: Any, *, least: int, most: int = sys.maxsize, what: str) -> int:
    """An integer of Python or NumPy between two limits; `what` says what it is."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        limits = f"at least {least}" if most == sys.maxsize else f"{least} to {most}"
        raise DataError(f"{name} is {value!r}, but {what}, {limits}.")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """True or False, or what equals one of them."""
    if not isinstance(value, (bool, Integral)) and type(value).__name__ not in ("bool", "bool_"):
        raise DataError(f"{name} is True or False, not {value!r}.")
    return bool(value)


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise DataError(f"{name} is a number, not {value!r}.")
    return float(value)


def seconds(name: str, value: Any) -> float:
    """A time that is not negative."""
    if number(name, value) < 0:
        raise DataError(f"{name} is a number of seconds, or 0 for the default, not {value!r}.")
    return float(value)


def member(name: str, value: Any, kind: type[E]) -> E:
    """A member of an enumeration, or its number."""
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(f"{kind.__name__}.{item.name}" for item in kind)
        raise DataError(f"{name} is one of {choices}, not {value!r}.") from None


def called(name: str, value: Any) -> None:
    """Something to call, or None."""
    if value is not None and not callable(value):
        raise DataError(f"{name} is a function, or None, not {value!r}.")


def iterated(name: str, value: Any) -> None:
    """Something to iterate over, or None."""
    is_sequence = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    if value is not None and not is_sequence and not hasattr(value, "__iter__"):
        raise DataError(f"{name} gives the indices of samples by iteration, which {value!r} does not.")


def keywords(name: str, value: Any, known: list[str]) -> dict[str, Any]:
    """A dictionary of arguments with these names, or None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{name} is a dictionary of arguments, not {value!r}.")
    for key in value:
        if key not in known:
            raise DataError(f"{name} has no argument {key!r}{nearest(str(key), known)}.")
    return dict(value)
