"""What a compilation is doing, told by those who do it to whoever shows it.

Compilations take turns, so there is one listener at a time; the parts of one may be done by several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_WHERE: ContextVar[tuple[str, ...]] = ContextVar("where a thread is in a compilation", default=())
_LISTENERS: list[Callable[[str], None]] = []


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Inside, the listener is told where the compilation is, such as `program 2 of 3 (update), part 1 of 4`."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


@contextmanager
def working_on(what: str) -> Iterator[None]:
    """Say what the block does; blocks inside say which part of it."""
    before = _WHERE.set((*_WHERE.get(), what))
    for listener in _LISTENERS:
        listener(", ".join(_WHERE.get()))
    try:
        yield
    finally:
        _WHERE.reset(before)
