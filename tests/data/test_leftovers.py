"""Names in shared memory go with the process whose number they contain."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from poptorch.data.leftovers import kill_group, remove_segments
from processes import members

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system of shared memory")


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


def test_a_group_goes_with_the_names_of_all_its_processes():
    leader = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdout is not None
    with leader.stdout:
        pids = [leader.pid, int(leader.stdout.readline())]
    paths = [Path("/dev/shm") / f"torch_{pid}_1_2" for pid in pids]
    try:
        for path in paths:
            path.touch()
        kill_group(leader.pid)
        assert not any(path.exists() for path in paths)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
    assert leader.wait() == -signal.SIGKILL
    assert members(group=leader.pid) == {}
