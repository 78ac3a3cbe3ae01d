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

from poptorch.data.process_table import process_table

_SHARED_MEMORY = Path("/dev/shm")
_DYING_SECONDS = 1.0  # a process that was killed may finish what it asks of the system


def remove_segments(pid: int) -> None:
    """Remove the names that a process left behind; it must have ended, or be about to."""
    for path in _SHARED_MEMORY.glob(f"torch_{pid}_*"):
        with contextlib.suppress(OSError):
            path.unlink()


def kill_group(group: int) -> None:
    """Kill the processes of a group, this one last if it is a member, and remove the names they leave behind."""
    others = _others_of(group)
    for pid in others:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + _DYING_SECONDS
    while others & _others_of(group) and time.monotonic() < end:
        time.sleep(0.005)
    for pid in others:
        remove_segments(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)  # this process, and those that were started meanwhile


def _others_of(group: int) -> set[int]:
    """The processes of a group that run, without this one."""
    table = process_table()
    return {process.pid for process in table if process.group == group and not process.has_ended} - {os.getpid()}
