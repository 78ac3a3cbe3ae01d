"""The store that all processes read and write, with a limit for every access.

Torch waits for the machine of the store as long as the network does, which may be a quarter of an hour, and lets
everybody else wait behind it. Here a thread of its own talks to the store, and whoever gets no answer in time goes on
without: the store is lost, and is not asked again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from torch import distributed

_WRITE_SECONDS = 10.0  # what is written is not waited for by anybody, so an answer comes at once
Answer = queue.SimpleQueue[tuple[Any, Exception | None]]


class Board:
    """What processes let each other know, by names. Raises `DistError` if that is not possible (any more)."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._is_lost = False
        self._asked: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Answer]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="poptorch store", daemon=True).start()

    def read(self, name: str) -> bytes:
        """What is written under a name; waits for it."""
        return self._ask(2 * self._seconds, self._store.get, name)

    def write(self, name: str, text: str) -> None:
        self._ask(min(_WRITE_SECONDS, self._seconds), self._store.set, name, text)

    def has(self, name: str) -> bool:
        """Whether something is written under a name."""
        return self._ask(self._seconds, self._store.check, [name])

    def _ask(self, seconds: float, function: Callable[..., Any], *args: Any) -> Any:
        if self._is_lost:
            raise distributed.DistNetworkError("the store was lost before")
        answer: Answer = queue.SimpleQueue()
        self._asked.put((function, args, answer))
        try:
            result, error = answer.get(timeout=seconds)
        except queue.Empty:
            self._is_lost = True
            raise distributed.DistNetworkError(f"the store did not answer within {seconds:g} s") from None
        if isinstance(error, distributed.DistNetworkError):
            self._is_lost = True  # torch would report every further attempt at length
        if error is not None:
            raise error
        return result

    def _serve(self) -> None:
        while True:
            function, args, answer = self._asked.get()
            try:
                answer.put((function(*args), None))
            except Exception as error:
                answer.put((None, error))
