"""Trace points: names for stretches of time, which show up in profiles made with `torch.profiler`."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch.profiler import record_function

from poptorch._logging import logger

T = TypeVar("T")


class Channel:
    """A family of trace points, each called `<channel>.<name>`; without a profiler they do nothing.

    >>> import poptorch
    >>> channel = poptorch.profiling.Channel("loading")
    >>> with channel.tracepoint("epoch"):
    ...     pass
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def tracepoint(self, name: str) -> AbstractContextManager[Any]:
        """A context manager: the time inside it is recorded under this name."""
        return record_function(f"{self._name}.{name}")

    def instrument(self, obj: T, *methods: str) -> T:
        """Record every call of these methods of an object, and give the object back."""
        for name in methods:
            method = getattr(obj, name, None)
            if callable(method):
                setattr(obj, name, self._recorded(name, method))
            else:
                logger.info("there is no method %s of %s to trace", name, type(obj).__name__)
        return obj

    def _recorded(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self.tracepoint(name):
                return method(*args, **kwargs)

        return recorded
