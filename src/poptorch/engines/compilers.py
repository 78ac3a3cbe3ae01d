"""Processes of the C++ compiler: no more at a time than the machine can take, and none that outlives us.

A compiler starts further processes, so it is ended together with all of them. It has a session of its own, so that a
Ctrl-C of the terminal reaches only Python, which may want to go on. In a process that leads a session itself, such as
the one that compiles for the tiered engine, compilers are part of that: whoever ends the session means them, too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from poptorch import environment
from poptorch.errors import VariableError

_LIMIT_SECONDS = 3600  # for one file; a large one takes a minute
_PATIENCE = 0.5  # between two looks at the memory that is left
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


class CompilerError(RuntimeError):
    """A compiler ended with an error; the message is what it said."""


class Stopped(RuntimeError):
    """A compiler was ended, or not even started, because nobody wants its result any more."""


class Job:
    """Compilers that are wanted for the same purpose, and are stopped together."""

    def __init__(self, *, is_urgent: bool = True) -> None:
        self.is_urgent = is_urgent  # otherwise its compilers give way to everything else on the machine
        self.is_stopped = False
        self._running: set[subprocess.Popen[str]] = set()
        with _CHANGED:
            _JOBS.add(self)

    @property
    def running(self) -> int:
        """How many of its compilers run now."""
        with _CHANGED:
            return len(self._running)

    def run(self, command: Sequence[str], folder: str) -> None:
        """Run a compiler in a folder to its end, as soon as there is room for one more; the calling thread waits.

        Raises `CompilerError` if it fails, and `Stopped` if the job was stopped in the meantime.
        """
        with self._place():
            process = self._start(command if self.is_urgent else ["nice", "-n", "19", *command], folder)
            try:
                said, _ = process.communicate(timeout=_LIMIT_SECONDS)
            except BaseException:
                _end(process)
                raise
            finally:
                with _CHANGED:
                    self._running.discard(process)
        if process.returncode and self.is_stopped:
            raise Stopped("the compiler was stopped")
        if process.returncode:
            raise CompilerError(f"{command[0]} ended with code {process.returncode}: {_first_error(said)}")

    def stop(self) -> None:
        """End its compilers, and let none of those that wait for their turn start."""
        with _CHANGED:
            self.is_stopped = True
            running = list(self._running)
            _CHANGED.notify_all()
        for process in running:
            _end(process)

    @contextmanager
    def _place(self) -> Iterator[None]:
        global _taken
        with _CHANGED:
            while not self.is_stopped and not _has_room():
                _CHANGED.wait(_PATIENCE)
            if self.is_stopped:
                raise Stopped("the compiler was not started")
            _taken += 1
        try:
            yield
        finally:
            with _CHANGED:
                _taken -= 1
                _CHANGED.notify_all()

    def _start(self, command: Sequence[str], folder: str) -> subprocess.Popen[str]:
        with _CHANGED:
            if self.is_stopped:
                raise Stopped("the compiler was not started")
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                start_new_session=not _leads_session(),
            )
            self._running.add(process)
            return process


# What all jobs of this process share, because it is the machine's.
_CHANGED = threading.Condition()
_JOBS: weakref.WeakSet[Job] = weakref.WeakSet()
_taken = 0  # places of compilers that run, or are about to


def _has_room() -> bool:
    """Whether one more may start: the first always, others if there are threads and memory for them."""
    return _taken == 0 or (_taken < thread_limit() and _free_nbytes() >= memory_limit())


def stop_all() -> None:
    """End all compilers that this process has started."""
    with _CHANGED:
        jobs = list(_JOBS)
    for job in jobs:
        job.stop()


def _forget() -> None:
    """A child that was forked has none of its parent's compilers, and must not end them."""
    global _CHANGED, _JOBS, _taken
    _CHANGED, _JOBS, _taken = threading.Condition(), weakref.WeakSet(), 0


atexit.register(stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def thread_limit() -> int:
    """How many compilers may run at the same time: what the environment says, else one for each processor."""
    variable = environment.COMPILE_THREADS
    if not variable.read():
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if variable.integer() < 1:
        raise VariableError(f"environment variable {variable.name} is {variable.read()!r}, but must be at least 1")
    return variable.integer()


def memory_limit() -> int:
    """How many bytes must be free before a second compiler is started."""
    return environment.COMPILE_MEMORY.integer() * 2**20


def _free_nbytes() -> float:
    """What the machine has left, or the container if that has less; a lot if neither says."""
    found = [float("inf")]
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="ascii").splitlines())
        found.append(int(lines.get("MemAvailable", "").split()[0]) * 2**10)
    with contextlib.suppress(OSError, ValueError):
        most, used = ((_GROUP / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current"))
        found.append(int(most) - int(used))
    return min(found)


def _leads_session() -> bool:
    return os.getsid(0) == os.getpid()


def _end(process: subprocess.Popen[str]) -> None:
    """End a compiler and what it has started; it may be gone already."""
    if process.returncode is None:
        _end_tree(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


def _end_tree(number: int) -> None:
    """End a process after those that it has started; it is stopped first, so that it starts no more."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(number, signal.SIGSTOP)
        with contextlib.suppress(OSError):  # a system that does not tell
            for child in Path(f"/proc/{number}/task/{number}/children").read_text(encoding="ascii").split():
                _end_tree(int(child))
        os.kill(number, signal.SIGKILL)


def _first_error(said: str) -> str:
    lines = [line for line in said.splitlines() if "error" in line] or said.strip().splitlines()
    return lines[0] if lines else "it said nothing"
