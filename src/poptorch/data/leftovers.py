"""Ending processes without leaving names of shared memory behind.

A worker of PyTorch gives a batch a name in shared memory, opens it and removes the name at once. If it is killed in
between, only the name tells whose it was: it contains the number of the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from poptorch.data.process_table import ProcessStat, process_table

_SHARED_MEMORY = Path("/dev/shm")
_DYING_SECONDS = 3.0  # a process that was killed may finish what it asks of the system, slowly on a busy machine


def remove_segments(pid: int) -> None:
    """Remove the names that a process left behind; it must have ended, or be about to."""
    for path in _SHARED_MEMORY.glob(f"torch_{pid}_*"):
        with contextlib.suppress(OSError):
            path.unlink()


def kill_group(group: int) -> None:
    """Kill the processes of a group, this one last if it is a member, and remove the names they leave behind."""
    others = {process.pid for process in _others_of(group)}  # some may be dead, and nobody left to tidy up after them
    for pid in others:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + _DYING_SECONDS
    while time.monotonic() < end and any(p.pid in others and not p.has_ended for p in _others_of(group)):
        time.sleep(0.005)
    for pid in others:
        remove_segments(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)  # this process, and those that were started meanwhile


def _others_of(group: int) -> list[ProcessStat]:
    """The processes of a group without this one, those included that have ended and were not yet waited for."""
    return [process for process in process_table() if process.group == group and process.pid != os.getpid()]
