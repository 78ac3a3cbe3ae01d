"""Compiler processes: what is said about one that takes long, and that none outlives what it was started for."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from poptorch.model import compilers
from poptorch.model.compilers import Compiler, Stalls, end_marked, marked, running_compilers
from processes import members

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")


def start(tmp_path: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """`g++ x.cpp` that waits for `cc1plus x.cpp`, which waits for input that never comes."""
    for name in ("g++", "cc1plus"):
        shutil.copy(shutil.which("dash") or "/bin/sh", tmp_path / name)
    script = tmp_path / "x.cpp"
    script.write_text(f"{tmp_path}/cc1plus {tmp_path}/inner.cpp; true\n")
    (tmp_path / "inner.cpp").write_text(f"read line < {tmp_path}/never; true\n")
    os.mkfifo(tmp_path / "never")
    process = subprocess.Popen([str(tmp_path / "g++"), str(script)], start_new_session=True, env=environment)
    end = time.monotonic() + 30
    while not any(each.name == "cc1plus" for each in running_compilers(os.getpid())):
        assert time.monotonic() < end
        time.sleep(0.01)
    return process


@needs_proc
def test_only_the_innermost_compiler_counts_and_tells_its_file(tmp_path):
    process = start(tmp_path)
    try:
        (found,) = running_compilers(os.getpid())
        assert (found.name, found.source) == ("cc1plus", str(tmp_path / "inner.cpp"))
        assert running_compilers(process.pid) == [found]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert running_compilers(os.getpid()) == []


@needs_proc
def test_compilers_that_outlive_who_started_them_are_found_and_ended(tmp_path):
    token = secrets.token_hex(8)
    process = start(tmp_path, {**os.environ, **marked(token)})
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, **marked(token)})
    process.kill()
    process.wait()
    assert members(group=process.pid)  # the inner one
    end_marked(token)
    assert members(group=process.pid) == {}
    assert other.poll() is None  # no compiler
    other.kill()
    other.wait()


@needs_proc
def test_compilers_of_others_go_on(tmp_path):
    process = start(tmp_path)
    try:
        end_marked(secrets.token_hex(8))
        assert process.poll() is None
        assert running_compilers(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def clock(monkeypatch):
    """Moments that a test chooses, and the compilers that run then."""
    moment = {"now": 0.0, "running": []}
    monkeypatch.setattr(compilers, "running_compilers", lambda root: moment["running"])
    return moment


def test_a_compiler_is_reported_once_after_a_minute_with_what_it_does(clock, caplog):
    stalls = Stalls(lambda: clock["now"])
    clock["running"] = [Compiler(17, "cc1plus", "/tmp/x.cpp")]
    for now in range(0, 200, 5):
        clock["now"] = float(now)
        stalls.look(1, "Compiling the programs, program 2 of 3 (update)")
        assert bool(caplog.records) == (now >= 60)
    (message,) = caplog.messages
    assert "program 2 of 3 (update): cc1plus (process 17) on /tmp/x.cpp has been at work for 60 s" in message


def test_compilers_that_come_and_go_are_no_stall(clock, caplog):
    stalls = Stalls(lambda: clock["now"])
    for now in range(0, 200, 5):
        clock["now"], clock["running"] = float(now), [Compiler(now, "cc1plus", "")]
        stalls.look(1, "Compiling the programs")
    assert caplog.messages == []


def test_a_generator_that_does_not_get_on_is_reported(clock, caplog):
    stalls = Stalls(lambda: clock["now"])
    for now in (0.0, 30.0, 61.0):
        clock["now"] = now
        stalls.look(1, "Compiling the programs, program 1 of 1 (step)")
    assert "program 1 of 1 (step): PyTorch's code generator has been at work for 61 s" in caplog.text
