"""Processes of the compiler: how many, how much memory is left for them, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from poptorch.engines import compilers
from poptorch.engines.building import in_thread
from poptorch.engines.compilers import CompilerError, Job, Stopped
from poptorch.errors import VariableError

LIMIT = 60


@pytest.fixture
def program(tmp_path):
    """Makes an executable script, and gives its path."""

    def make(text: str, name: str = "compiler") -> str:
        path = tmp_path / name
        path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
        path.chmod(0o755)
        return str(path)

    return make


def most_at_a_time(job: Job, command: str, folder: Path) -> int:
    """Run six of them; gives how many ran at the same time at most."""
    seen: list[int] = []
    runs = [in_thread(lambda: job.run([command], str(folder))) for _ in range(6)]
    while not all(run.done() for run in runs):
        seen.append(job.running)
        time.sleep(0.01)
    for run in runs:
        run.result()
    return max(seen)


@pytest.mark.parametrize(("threads", "expected"), [("1", 1), ("3", 3)])
def test_no_more_compilers_run_than_the_environment_allows(threads, expected, program, tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_COMPILE_THREADS", threads)
    monkeypatch.setenv("POPTORCH_COMPILE_MEMORY", "0")
    assert most_at_a_time(Job(), program("sleep 0.3"), tmp_path) == expected


def test_two_jobs_share_the_limit(program, tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_COMPILE_THREADS", "1")
    command, jobs = program("sleep 0.2"), [Job(), Job()]
    runs = [in_thread(lambda job=job: job.run([command], str(tmp_path))) for job in jobs]
    while not all(run.done() for run in runs):
        assert sum(job.running for job in jobs) <= 1
        time.sleep(0.01)


def test_without_memory_only_one_compiler_runs(program, tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_COMPILE_THREADS", "4")
    monkeypatch.setenv("POPTORCH_COMPILE_MEMORY", str(2**40))
    monkeypatch.setattr(compilers, "_PATIENCE", 0.01)
    assert most_at_a_time(Job(), program("sleep 0.1"), tmp_path) == 1


def test_the_memory_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(compilers, "_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    assert compilers._free_nbytes() == 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert compilers._free_nbytes() > 2**20


@pytest.mark.parametrize("value", ["0", "-2", "many"])
def test_a_limit_that_makes_no_sense_is_named(value, monkeypatch):
    monkeypatch.setenv("POPTORCH_COMPILE_THREADS", value)
    with pytest.raises(VariableError, match=f"POPTORCH_COMPILE_THREADS is '{value}'"):
        compilers.thread_limit()


def test_the_first_error_is_quoted(program, tmp_path):
    command = program("echo 'in file included from'; echo 'x.cpp:3: error: no semicolon'; echo more; exit 4")
    with pytest.raises(CompilerError, match=r"code 4: x.cpp:3: error: no semicolon$"):
        Job().run([command], str(tmp_path))


def is_alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def number_in(path: Path) -> int:
    """The number of a process that is written to a file, as soon as it is."""
    end = time.monotonic() + LIMIT
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < end, f"nobody wrote {path}"
        time.sleep(0.01)
    return int(path.read_text())


def wait_for_end(*numbers: int) -> None:
    end = time.monotonic() + LIMIT
    while any(map(is_alive, numbers)):
        assert time.monotonic() < end, f"still there: {[n for n in numbers if is_alive(n)]}"
        time.sleep(0.02)


def test_stopping_ends_a_compiler_and_what_it_started(program, tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_COMPILE_THREADS", "1")
    job = Job()
    command = program("sleep 600 & echo $! > inner; wait")
    first = in_thread(lambda: job.run([command], str(tmp_path)))
    inner = number_in(tmp_path / "inner")
    second = in_thread(lambda: job.run([command], str(tmp_path)))  # waits for its turn
    job.stop()
    for run in (first, second):
        with pytest.raises(Stopped):
            run.result(LIMIT)
    wait_for_end(inner)
    with pytest.raises(Stopped):
        job.run([command], str(tmp_path))


def test_stopping_one_job_leaves_the_others_alone(program, tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_COMPILE_THREADS", "4")
    job, other = Job(), Job()
    run = in_thread(lambda: other.run([program("sleep 0.5")], str(tmp_path)))
    job.stop()
    run.result(LIMIT)


def test_whoever_ends_the_session_that_we_lead_ends_compilers(program, tmp_path):
    """That is how the process is ended that compiles for the tiered engine."""
    command = program("sleep 600 & echo $! > inner; wait")
    lines = f"from poptorch.engines.compilers import Job\nJob().run([{command!r}], {str(tmp_path)!r})"
    process = subprocess.Popen([sys.executable, "-c", lines], start_new_session=True)
    inner = number_in(tmp_path / "inner")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(LIMIT)
    wait_for_end(inner)


def test_a_terminal_does_not_reach_compilers(program, tmp_path, monkeypatch):
    """Python decides what an interrupt means: it may have a handler that lets a program go on."""
    monkeypatch.setattr(compilers, "_leads_session", lambda: False)
    Job().run([program("cut -d' ' -f5 /proc/$$/stat > group")], str(tmp_path))
    assert int((tmp_path / "group").read_text()) != os.getpgrp()


TRAINING = """
    import torch, poptorch
    model = torch.nn.Linear(3, 2)
    options = poptorch.Options().engine("inductor")
    poptorch.inferenceModel(model, options)(torch.ones(2, 3))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "end of Python"])
def test_an_interrupt_leaves_no_compiler(number, program, tmp_path):
    real = subprocess.run(["which", "g++"], capture_output=True, text=True).stdout.strip()
    if not real:
        pytest.skip("needs a C++ compiler")
    slow = f'case "$*" in *poptorch-build*) sleep 600 & echo $! > {tmp_path}/inner; wait;; *) exec {real} "$@";; esac'
    script = tmp_path / "train.py"
    end = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
    script.write_text(end + textwrap.dedent(TRAINING))
    folders = {
        name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "POPTORCH_CACHE_DIR", "POPTORCH_MACHINE_DIR")
    }
    environment = {**os.environ, **folders, "CXX": program(slow, "slow-g++"), "POPTORCH_COMPILE_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        inner = number_in(tmp_path / "inner")
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in said if number == signal.SIGINT else process.returncode == 3
    wait_for_end(inner)


def test_threads_of_compilers_do_not_keep_python_alive():
    assert in_thread(lambda: threading.current_thread().daemon).result(LIMIT)
