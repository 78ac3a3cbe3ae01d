"""Checks that option setters share; each returns the value in its stored form or raises `AssertionError`."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

E = TypeVar("E", bound=Enum)


def integer(name: str, value: object) -> int:
    if not isinstance(value, int):
        raise AssertionError(f"{name} takes an int, not {value!r} ({type(value).__name__})")
    return int(value)


def member(name: str, value: object, kind: type[E]) -> E:
    if not isinstance(value, kind):
        choices = ", ".join(f"{kind.__name__}.{item.name}" for item in kind)
        raise AssertionError(f"{name} takes one of {choices}, not {value!r}")
    return value


def one_of(name: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise AssertionError(f"{name} takes one of {', '.join(map(repr, choices))}, not {value!r}")
    return str(value)
