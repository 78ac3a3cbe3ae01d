"""Checks that option setters share; each returns the value in its stored form or raises `OptionError`."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TypeVar, cast

from poptorch.errors import OptionError

E = TypeVar("E", bound=Enum)


def integer(name: str, value: object) -> int:
    if not isinstance(value, int):
        raise OptionError(f"{name} takes an int, not {value!r} ({type(value).__name__})")
    return int(value)


def at_least(least: int, name: str, value: object) -> int:
    number = integer(name, value)
    if number < least:
        raise OptionError(f"{name} is {number}, but must be at least {least}")
    return number


def at_least_one(name: str, value: object) -> int:
    """For what counts something that there must be."""
    return at_least(1, name, value)


def not_negative(name: str, value: object) -> int:
    """For what counts something that there need not be, and for what is counted from 0."""
    return at_least(0, name, value)


def truth(name: str, value: object) -> bool:
    """For switches that take whatever Python takes for true or false."""
    try:
        return bool(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"{name} takes True or False, not {value!r} ({error})") from error


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} takes True or False, not {value!r} ({type(value).__name__})")
    return value


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name} takes a str, not {value!r} ({type(value).__name__})")
    return value


def texts(name: str, value: object) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionError(f"{name} takes a list of str, not {value!r}")
    return [text(name, item) for item in cast("Iterable[object]", value)]


def member(name: str, value: object, kind: type[E]) -> E:
    if not isinstance(value, kind):
        choices = ", ".join(f"{kind.__name__}.{item.name}" for item in kind)
        raise OptionError(f"{name} takes one of {choices}, not {value!r}")
    return value


def one_of(name: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{name} takes one of {', '.join(map(repr, choices))}, not {value!r}")
    return value


def positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise OptionError(f"{name} takes a positive number, not {value!r}")
    return float(value)
