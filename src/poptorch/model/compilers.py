"""The compiler processes of a compilation, seen from outside: what they are at, and their end.

They are found by what the system knows about processes (Linux's /proc), because who has started them is busy, or gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from poptorch._logging import logger
from poptorch.data.process_table import process_table

STALLED_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_MARK = "_POPTORCH_COMPILATION"  # an environment variable, which processes hand on
_NAMES = ("cc1plus", "cc1", "g++", "gcc", "c++", "clang", "as", "ld", "collect2", "lto", "icpx")
_ROUNDS = 50  # of looking for processes that were started meanwhile


@dataclass(frozen=True)
class Compiler:
    """A compiler that is running."""

    pid: int
    name: str
    source: str  # the file that it works on, if it says so

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid}){' on ' if self.source else ''}{self.source}"


def _compiler(pid: int) -> Compiler | None:
    """The compiler that a process is, if it is one."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended meanwhile
        return None
    if not any(part.startswith(_NAMES) for part in (name, name.rpartition("-gnu-")[2])):
        return None
    sources = [argument for argument in command if argument.endswith((".cpp", ".s", ".o", ".h"))]
    return Compiler(pid, name, sources[0] if sources else "")


def running_compilers(root: int) -> list[Compiler]:
    """The compilers that a process has started, directly or not, without those that only wait for another one."""
    children: dict[int, list[int]] = {}
    for process in process_table():
        if not process.has_ended:
            children.setdefault(process.parent, []).append(process.pid)
    return _compilers_below(root, children)


def _compilers_below(root: int, children: Mapping[int, list[int]]) -> list[Compiler]:
    found: list[Compiler] = []
    for pid in children.get(root, []):
        inside, own = _compilers_below(pid, children), _compiler(pid)
        found += inside or ([] if own is None else [own])
    return found


class Stalls:
    """Reports what takes long: a compiler, or whatever else goes on, each once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_look = 0.0
        self._since: dict[Compiler | str, float] = {}
        self._reported: set[Compiler | str] = set()

    def look(self, root: int, doing: str) -> None:
        """See what compilers of a process are at; may be called as often as one likes."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        busy: list[Compiler | str] = [*running_compilers(root)] or [doing]
        self._since = {each: self._since.get(each, now) for each in busy}
        for each, since in self._since.items():
            if now - since >= STALLED_SECONDS and each not in self._reported:
                self._reported.add(each)
                what = f"{doing}: {each}" if each != doing else f"{doing}: PyTorch's code generator"
                logger.warning("%s has been at work for %.0f s. Ctrl-C or destroy() ends it.", what, now - since)


def marked(token: str) -> dict[str, str]:
    """The environment of a process whose compilers shall be found by this token, also when they have outlived it."""
    return {_MARK: token}


def end_marked(token: str) -> None:
    """End the compilers that a process has started, after it has been killed; each leads a process group of its own."""
    for _ in range(_ROUNDS):
        found = _marked(token)
        if not found:
            return
        for each in found:
            logger.debug("ending %s", each)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each.pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(token: str) -> list[Compiler]:
    mark, found = f"{_MARK}={token}".encode(), list[Compiler]()
    for process in process_table():
        with contextlib.suppress(OSError):  # of other users, or it has ended
            is_ours = mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            compiler = _compiler(process.pid) if is_ours and not process.has_ended else None
            if compiler is not None:
                found.append(compiler)
    return found
