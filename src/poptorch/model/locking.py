"""Which parts of executors wait for each other when several threads use them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])

COMPILING = threading.RLock()  # tracing and generating code use switches of PyTorch that all threads share


class Lock:
    """A lock of one executor, held `with lock.held`; a copy of the executor has one of its own."""

    def __init__(self) -> None:
        self.held = threading.RLock()

    def __reduce__(self) -> Any:
        return Lock, ()


def one_at_a_time(method: Method) -> Method:
    """A method of an executor that waits for those which other threads have called."""

    @functools.wraps(method)
    def exclusive(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock.held:
            return method(self, *args, **kwargs)

    return exclusive  # pyright: ignore[reportReturnType]
