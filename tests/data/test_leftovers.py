"""Names in shared memory go with the process whose number they contain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from poptorch.data.leftovers import kill_group, remove_segments
from processes import members, segments

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
    assert leader.wait() in (-signal.SIGKILL, 0)  # 0 was seen once: a shell may end by itself
    assert members(group=leader.pid) == {}


def test_also_the_names_of_a_process_that_was_killed_but_not_waited_for():
    code = "import os, time; child = os.fork(); child and os.write(1, b'%d' % child); time.sleep(1000)"
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    with leader.stdout:
        pid = int(os.read(leader.stdout.fileno(), 20))
    path = Path("/dev/shm") / f"torch_{pid}_1_2"
    try:
        path.touch()
        os.kill(pid, signal.SIGKILL)
        while pid in members(group=leader.pid):
            time.sleep(0.001)
        kill_group(leader.pid)
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)
    assert leader.wait() == -signal.SIGKILL


NAMING = """
import os
from pathlib import Path
from data_sets import Failing

class Naming(Failing):  # every worker looks as if it were in the middle of sending a batch
    def __getitem__(self, index):
        Path(f"/dev/shm/torch_{{os.getpid()}}_1_2").touch()
        return super().__getitem__(index)

mode = poptorch.DataLoaderMode.{mode}
loader = poptorch.DataLoader(poptorch.Options(), Naming("exit", at=-1, notes={notes!r}), num_workers=2, mode=mode,
                             async_options={{"sharing_strategy": poptorch.SharingStrategy.Fork}})
for _ in zip(range(2), loader):  # one batch of each worker
    pass
"""


@pytest.mark.parametrize("mode", ["Sync", "Async"])
@pytest.mark.parametrize("end", ["", "del loader"])
def test_the_end_of_a_program_or_a_loader_leaves_no_names(programs, tmp_path, mode, end):
    notes = tmp_path / "pids"
    programs.run(NAMING.format(mode=mode, notes=str(notes)) + end)
    pids = set(notes.read_text().split())
    assert len(pids) == 2
    assert segments(pids) == []
