"""A worker must not outlive the process that it works for, however that one ends.

The owner holds the writing end of a pipe that nobody else has; the system closes it even if the owner is killed. The
worker keeps a thread that waits for this and then kills the worker, whatever its other threads are stuck in.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.util import register_after_fork

from poptorch.data.leftovers import kill_group, remove_segments


class Lifeline:
    """Made by the owner, passed to the worker, which calls `attach`."""

    def __init__(self) -> None:
        self._reader, self._writer = Pipe(duplex=False)
        # A process forked from the owner inherits the writing end; it would keep every other worker alive.
        register_after_fork(self, Lifeline.cut)

    def __getstate__(self) -> dict[str, object]:
        return {"_reader": self._reader, "_writer": None}

    def attach(self, end: Callable[[], None]) -> None:
        """Call `end` when the owner is gone. To be called in the worker."""
        threading.Thread(target=self._watch, args=(end,), daemon=True, name="poptorch-lifeline").start()

    def _watch(self, end: Callable[[], None]) -> None:
        with contextlib.suppress(EOFError, OSError):
            self._reader.recv_bytes()
        end()

    def cut(self) -> None:
        """Give up the writing end; workers that are attached end."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def end_process() -> None:
    """Kill this process at once."""
    remove_segments(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


def end_group() -> None:
    """Kill this process and everything it started."""
    kill_group(os.getpgrp())
