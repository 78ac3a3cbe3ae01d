"""Native code for an executable, compiled by another process while this one goes on.

A process rather than a thread: Python runs one thread at a time, so a thread that generates code would slow the model
down, and a loader that forks its workers at the wrong moment would copy locks that nobody releases. The executable
goes there as a file, and the code comes back as one, signed as in the cache; `compile_process` is the other side.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from poptorch import environment
from poptorch._logging import logger
from poptorch.engines import Kernel, surroundings
from poptorch.errors import FileError
from poptorch.executable import Executable
from poptorch.model.compile_process import ANSWER, ERRORS, REQUEST, START, Order, Outcome
from poptorch.model.compilers import Stalls, end_marked, marked
from poptorch.store import executable_parts, read_container, read_kernels, write_container
from poptorch.store.files import programs_digest

_DYING_SECONDS = 5.0  # that a process may take to end after it was killed
_GLANCE_SECONDS = 0.05  # between looks at a process that somebody waits for


class Verdict(Enum):
    """What became of a compilation in the background."""

    READY = auto()
    FAILED = auto()  # the programs cannot be compiled
    ONLY_HERE = auto()  # they can, but the result cannot leave the process that made it


@dataclass(frozen=True)
class Answer:
    """The end of a compilation: its kernels if it is `READY`, and the reason if it is not."""

    verdict: Verdict
    kernels: dict[str, Kernel]
    reason: str


class BackgroundCompilation:
    """A compilation that runs while somebody polls for its answer; it ends with whoever holds it."""

    def __init__(self, executable: Executable, programs: list[str], cache: Path | None) -> None:
        """Raises `FormatError` if the executable cannot be written to a file, and `OSError` if there is no room."""
        self._made_from, self._surroundings = programs_digest(executable), surroundings()
        parts = executable_parts(executable)
        self._place = _Place(Path(tempfile.mkdtemp(prefix="poptorch-compile-")))
        self._close = weakref.finalize(self, self._place.remove)
        order = Order.of_this_process(programs, cache, self._surroundings)
        write_container(self._place.folder / REQUEST, {"kind": "request"}, {**parts, **order.parts()})
        self._stalls = Stalls()

    def poll(self) -> Answer | None:
        """The answer, if there is one; otherwise see that the process runs, as soon as there is room for it."""
        place = self._place
        if not place.is_ours:
            return None  # a fork of the process that compiles: it goes on as it is
        if place.process is None:
            place.start()
            return None
        if place.process.poll() is None:
            self._stalls.look(place.process.pid, "Compiling in the background")
            return None
        answer = self._read(place.process.returncode)
        self.close()
        return answer

    def wait(self, seconds: float) -> Answer | None:
        """The answer, as soon as it is there; None if it is not there in time."""
        end = time.monotonic() + seconds
        while (answer := self.poll()) is None and time.monotonic() < end and self._place.is_ours:
            time.sleep(_GLANCE_SECONDS)
        return answer

    def stop(self) -> None:
        """End the process and everything it has started; `poll` starts it again."""
        self._place.stop()

    def close(self) -> None:
        """End for good, and leave nothing behind."""
        self._close()

    def _read(self, code: int) -> Answer:
        try:
            found = read_container(self._place.folder / ANSWER)
        except FileError:
            return Answer(Verdict.FAILED, {}, _how_it_ended(code, self._place.folder / ERRORS))
        outcome = Outcome.read(found)
        if outcome.failure:
            return Answer(Verdict.FAILED, {}, outcome.failure)
        kernels = None if outcome.stays else read_kernels(found, self._made_from, self._surroundings)
        if kernels is None:
            return Answer(Verdict.ONLY_HERE, {}, outcome.stays or "its code cannot be loaded")
        return Answer(Verdict.READY, kernels, "")


class _Place:
    """The folder of a compilation and the process in it, apart from whoever holds the compilation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self._owner, self._token = os.getpid(), secrets.token_hex(8)

    @property
    def is_ours(self) -> bool:
        """Whether this process made it; a fork of it has a copy, and must leave files and processes alone."""
        return os.getpid() == self._owner

    @property
    def is_running(self) -> bool:
        return self.is_ours and self.process is not None and self.process.poll() is None

    def start(self) -> None:
        if sum(place.is_running for place in _PLACES) >= _most_at_once():
            return
        with open(self.folder / ERRORS, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *(["-X", "utf8"] if sys.flags.utf8_mode else []), "-c", START, str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**_environment(), **marked(self._token), "TMPDIR": str(self.folder)},
                start_new_session=True,  # so that it ends as a whole, and only when we say so
            )
        _PLACES.add(self)
        logger.debug("process %d compiles in the background", self.process.pid)

    def stop(self) -> None:
        process = self.process
        if process is None or not self.is_ours:
            return
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DYING_SECONDS)
            end_marked(self._token)
        self.process = None

    def remove(self) -> None:
        if self.is_ours:
            self.stop()
            shutil.rmtree(self.folder, ignore_errors=True)


_PLACES: weakref.WeakSet[_Place] = weakref.WeakSet()  # those that were started, of all models


def _most_at_once() -> int:
    """How many processes may compile: half of the cores are for the models that run meanwhile."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def _environment() -> dict[str, str]:
    """What the process sees: the modules that we see, a log of its own, and no way around an error."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        environment.LOG_DEST.name: "stderr",
        environment.DUMP.name: "",
        environment.EXPORT_PROTO_FILE.name: "",
        environment.FALLBACK.name: "0",
    }


def _how_it_ended(code: int, errors: Path) -> str:
    """What is known about a process that gave no answer."""
    how = f"signal {-code} ended the process that compiles" if code < 0 else f"the process that compiles ended ({code})"
    said = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() if errors.exists() else []
    hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
    return f"{how}{hint}: {said[-1]}" if said else f"{how}{hint}"
