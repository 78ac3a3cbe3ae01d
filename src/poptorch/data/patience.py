"""When to stop waiting for a worker: never because it is slow, soon if it does nothing.

A batch may take long for good reasons, and no fixed number of seconds tells a slow data set from one that hangs. So a
worker is judged by what it does: as long as it or a process it started uses processor time or waits for a disk, it is
busy. Only if there is neither a batch nor work for `idle` seconds, or no batch for `busy` seconds, patience ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from poptorch import environment
from poptorch.data.checks import seconds
from poptorch.data.process_table import ProcessStat, process_table
from poptorch.errors import DataError, explain

IDLE_SECONDS = 7.0
BUSY_SECONDS = 3600.0
POLL_SECONDS = 0.25  # how often a wait looks up
_WORKING_SHARE = 0.005  # of one core: below this a process is waiting, for example in a loop around a short sleep
_LOOK_SECONDS = 1.0  # how often processor times are read while waiting
_HELD_UP_SECONDS = 2.0  # a wait that has not looked up for so long was itself not running: suspended, or stopped


@dataclass(frozen=True)
class Patience:
    """How long to wait for one batch from workers that do nothing, and from workers that are busy."""

    idle: float = IDLE_SECONDS
    busy: float = BUSY_SECONDS

    @classmethod
    def of(cls, timeout: float = 0) -> Patience:
        """A positive timeout is a plain limit per batch; 0 means what the environment says, or the defaults."""
        timeout = seconds("timeout", timeout)
        if timeout == 0:
            timeout = _timeout_of_environment()
        return cls(timeout, timeout) if timeout else cls()

    @property
    def at_start(self) -> Patience:
        """For the first batch, which also takes starting a process and importing: never less than the defaults."""
        return Patience(max(self.idle, IDLE_SECONDS), max(self.busy, BUSY_SECONDS))

    def longer(self, seconds: float) -> Patience:
        return replace(self, idle=self.idle + seconds, busy=self.busy + seconds)


def _timeout_of_environment() -> float:
    variable = environment.DATA_TIMEOUT
    text = variable.read()
    try:
        return seconds(variable.name, float(text or 0))
    except (ValueError, DataError):
        raise DataError(
            explain(f"{variable.name}={text!r} is not a number of seconds.", fix=f"for example {variable.name}=60")
        ) from None


class Stopwatch:
    """Measures one wait at a time for the processes that `pids` gives, and says when it has lasted too long."""

    def __init__(self, patience: Patience, pids: Callable[[], Iterable[int]]) -> None:
        self.patience, self._pids = patience.at_start, pids
        self._usual_patience = patience
        self.start()

    def start(self) -> None:
        """A wait begins now."""
        self._began = self._worked = self._looked = self._awake = time.monotonic()
        self._spent: float | None = None

    def has_started(self) -> None:
        """The first batch has come."""
        self.patience = self._usual_patience

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    def verdict(self) -> str | None:
        """Why the wait should end, or None as long as it may go on; to be asked again and again while waiting."""
        now = time.monotonic()
        if now - self._awake > _HELD_UP_SECONDS:  # the workers may have been held up too, so they get this time again
            self._began, self._worked = self._began + now - self._awake, self._worked + now - self._awake
        self._awake = now
        if now - self._began >= self.patience.busy:
            return f"no batch for {now - self._began:.1f} s"
        if now - self._looked >= min(_LOOK_SECONDS, self.patience.idle / 4):
            self._look(now)
        if now - self._worked >= self.patience.idle:
            return f"no batch for {now - self._began:.1f} s, and the worker was idle all the time"
        return None

    def _look(self, now: float) -> None:
        self._looked = now
        spent = seconds_of_work(self._pids())
        if spent is None or math.isinf(spent):  # nobody can tell, or the disk is at work
            self._worked = now
        elif self._spent is None:
            self._spent = spent
        elif spent - self._spent > _WORKING_SHARE * self.patience.idle:
            self._spent, self._worked = spent, now


def seconds_of_work(pids: Iterable[int]) -> float | None:
    """Processor seconds of these processes and all their descendants; infinite while one of them waits for a disk.

    None where the system does not tell (it needs Linux's /proc).
    """
    table = {stat.pid: stat for stat in process_table()}
    if not table:
        return None
    roots = set(pids)
    members = [stat for stat in table.values() if _descends(stat, roots, table)]
    if any(stat.waits_for_disk for stat in members):
        return float("inf")
    return sum(stat.seconds for stat in members)


def _descends(stat: ProcessStat, roots: set[int], table: dict[int, ProcessStat]) -> bool:
    current: ProcessStat | None = stat
    while current is not None:
        if current.pid in roots:
            return True
        current = table.get(current.parent)
    return False
