"""Names in shared memory go with the process whose number they contain."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poptorch.data.leftovers import remove_segments


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system of shared memory")
def test_only_the_names_of_that_process_are_removed():
    pid = os.getpid()
    own, other = (Path("/dev/shm") / f"torch_{number}_1_2" for number in (pid, f"{pid}0"))
    try:
        for path in (own, other):
            path.touch()
        remove_segments(pid)
        assert not own.exists()
        assert other.exists()
    finally:
        for path in (own, other):
            path.unlink(missing_ok=True)
