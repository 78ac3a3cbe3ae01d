"""What every process tells the others about itself, in the store that they share: that it lives, and where it is.

A thread writes it down several times a second, so that a process that dies or hangs has left its last line.
"""

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_SECONDS = 0.5  # between two signs of life
_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_LIBRARY = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True)
class Sign:
    """A sign of life: which it is, how many exchanges were begun, and the line of the program that was running."""

    number: int
    exchanges: int
    line: str
    failure: str = ""  # what the process raised
    blames: int | None = None  # the process that it raised this because of
    has_ended: bool = False

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Sign:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Home:
    """Where a process runs."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.host}, process id {self.pid}"

    @classmethod
    def here(cls) -> Home:
        return cls(socket.gethostname(), os.getpid())


class Pulse:
    """Writes signs of life of this process until it is stopped; what cannot be written is left out."""

    def __init__(self, write: Callable[[str], Any]) -> None:
        self._write = write
        self._number = 0
        self._failure = ""
        self.blames: int | None = None  # the process that made this one fail
        self.exchanges = 0
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._main = threading.main_thread().ident
        self.beat()
        self._thread = threading.Thread(target=self._run, name="poptorch processes", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Write down a sign now."""
        with self._lock:
            self._number += 1
            line, over = user_line(self._main), self._is_over.is_set()
            self._write(Sign(self._number, self.exchanges, line, self._failure, self.blames, over).as_text())

    def fail(self, error: BaseException, blames: int | None = None) -> None:
        """Say what this process has raised, and which process that was because of."""
        last = str(error).strip().splitlines()
        self._failure, self.blames = f"{type(error).__name__}: {last[0] if last else ''}".rstrip(": "), blames
        self.beat()

    def forget(self) -> None:
        """What was raised is over: the program goes on."""
        if self._failure:
            self._failure, self.blames = "", None
            self.beat()

    def stop(self) -> None:
        """Write a last sign, and no more; the thread has ended when this returns."""
        self._is_over.set()
        self._thread.join(timeout=10 * _SECONDS)
        self.beat()

    def _run(self) -> None:
        while not self._is_over.wait(_SECONDS):
            try:
                self.beat()
            except Exception:  # the store is gone, and so is everybody who could read it
                return


def watch_seconds() -> float:
    """How long somebody has to look to see whether a process lives."""
    return 3 * _SECONDS


def user_line(thread: int | None) -> str:
    """The innermost line of the user's program that a thread is at."""
    frame = sys._current_frames().get(thread or 0)
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith((_OURS, _TORCH, _LIBRARY, "<")):
        found = found.f_back
    found = found or frame
    if found is None:
        return "the program has ended"
    name, line = found.f_code.co_filename, found.f_lineno
    return f"{os.path.basename(name)}:{line} {linecache.getline(name, line).strip()}".rstrip()
