"""Names of shared memory that a worker could not take back because it was ended at the wrong moment.

A worker of PyTorch gives a batch a name in shared memory, opens it and removes the name at once. If it is killed in
between, only the name tells whose it was: it contains the number of the process.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def remove_segments(pid: int) -> None:
    """Remove the names that a process left behind; it must have ended, or be about to."""
    for path in _SHARED_MEMORY.glob(f"torch_{pid}_*"):
        with contextlib.suppress(OSError):
            path.unlink()
