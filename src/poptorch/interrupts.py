"""Let an interrupt wait while something must not be left half done.

Python raises `KeyboardInterrupt` between any two instructions of the main thread, also in the middle of a `finally`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)


class Interrupts:
    """The signals that Python functions handle. While they are held, those functions are called later."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []
        self.are_held = False  # from True on, signals wait

    def watch(self) -> None:
        """Take over the handlers, which go on as before until they are held; only the main thread has any."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._receive)

    def release(self) -> None:
        """Give the handlers back, and call them for the signals that came."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.are_held = False
        for number, frame in self._arrived:
            self._handlers[number](number, frame)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.are_held:
            self._arrived.append((number, frame))
        else:
            self._handlers[number](number, frame)


def run_and_undo(body: Callable[[], T], undo: Callable[[], None]) -> T:
    """Run a function, and `undo` after it whatever happens. An interrupt may end the first, but not the second."""
    interrupts = Interrupts()
    interrupts.watch()
    try:
        try:
            result = body()
            interrupts.are_held = True  # an assignment: Python looks for signals at calls, which come too late here
        except BaseException:
            interrupts.are_held = True
            raise
        finally:
            undo()
    finally:
        interrupts.release()
    return result


def run_uninterrupted(body: Callable[[], T]) -> T:
    """Run a function to its end; signals that come meanwhile are handled after it."""
    interrupts = Interrupts()
    interrupts.are_held = True
    interrupts.watch()
    try:
        return body()
    finally:
        interrupts.release()
