"""Whatever happens in a worker, the main process gets an error in bounded time and nothing is left behind.

Every fault is made once or twice, with `pytest --long` 100 times; once, with one loader, is enough for `spawn`, which
imports PyTorch for each process and otherwise runs the same code as `forkserver`, the default.
"""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from processes import members, segments

FAULTS = {
    "exception": "ValueError: a broken sample",
    "exit": "exited with code 3",
    "kill": "was killed by SIGKILL",
    "segfault": "was killed by SIGSEGV",
    "sleep": "is stalled: no batch for",
}
LIMIT_SECONDS = 10
HOURS = 3600


def wait_for_end(session, seconds=LIMIT_SECONDS):
    """The processes that are left of a session when the time is over."""
    end = time.monotonic() + seconds
    while (left := members(session=session)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def call(function, *arguments):
    return f"from data import fault_driver; fault_driver.{function}(*{arguments!r})\n"


def outcomes(programs, *codes):
    """Run programs side by side to their end; nothing of them may be left."""
    found = []
    for program in [programs.start(code) for code in codes]:
        assert program.wait(4 * HOURS) == 0, program.errors
        assert wait_for_end(program.pid) == {}
        found += [json.loads(line) for line in program.output.splitlines()]
    return found


def check(found, fault):
    assert FAULTS[fault] in found["error"]
    assert found["batches"] <= 2  # those before the fault, unless they died with the worker
    assert found["seconds"] < LIMIT_SECONDS
    assert found["left"] == {}
    assert found["segments"] == []


@pytest.mark.long
@pytest.mark.timeout(4 * HOURS)
@pytest.mark.parametrize(
    ("start_method", "repeats", "loaders"),
    [
        ("fork", 2, [("Sync", 2), ("Async", 0), ("Async", 2), ("AsyncRebatched", 2)]),
        ("forkserver", 2, [("Sync", 1), ("Async", 0), ("AsyncRebatched", 0)]),
        ("spawn", 1, [("Sync", 1), ("Async", 0), ("AsyncRebatched", 0)]),
    ],
)
def test_faults(programs, tmp_path, start_method, repeats, loaders, request):
    is_long = request.config.getoption("--long")
    repeats = 100 if is_long else repeats
    if start_method == "spawn" and not is_long:
        loaders = loaders[1:2]
    codes = [
        call("run", mode, start_method, workers, repeats, str(tmp_path / f"{mode}{workers}"), *FAULTS)
        for mode, workers in loaders
    ]
    if start_method == "forkserver":  # each program would start a server of its own, which imports PyTorch
        codes = ["".join(codes)]
    found = outcomes(programs, *codes)
    expected = [(mode, fault) for mode, _ in loaders for fault in FAULTS for _ in range(repeats)]
    assert [(outcome["mode"], outcome["fault"]) for outcome in found] == expected
    for outcome in found:
        check(outcome, outcome["fault"])


def test_sleeping_forever_is_noticed_without_any_setting(programs, tmp_path):
    modes = ["Sync", "Async"]
    codes = [call("run", mode, "fork", 2, 1, str(tmp_path / mode), "sleep-by-default") for mode in modes]
    found = outcomes(programs, *codes)
    assert [outcome["mode"] for outcome in found] == modes
    for outcome in found:
        check(outcome, "sleep")
        assert "idle all the time" in outcome["error"]
        assert "POPTORCH_DATA_TIMEOUT" in outcome["error"]


@pytest.fixture
def notes(tmp_path):
    """The file in which workers note their process ids."""
    return tmp_path / "pids"


def waiting(programs, mode, workers, notes):
    """A program in the middle of an epoch."""
    program = programs.start(call("wait_in_the_loop", mode, "fork", workers, str(notes)))
    program.wait_for(lambda: program.output == "waiting\n", "the first batch")
    assert len(members(session=program.pid)) > 1
    return program


def check_nothing_is_left(program, notes):
    assert wait_for_end(program.pid) == {}
    assert segments({program.pid, *notes.read_text().split()}) == []


@pytest.mark.parametrize(("mode", "workers"), [("Sync", 2), ("Async", 0), ("Async", 2)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_main_process(programs, notes, mode, workers, number):
    program = waiting(programs, mode, workers, notes)
    os.kill(program.pid, number)
    assert program.wait() == -number
    check_nothing_is_left(program, notes)


@pytest.mark.parametrize(("mode", "workers"), [("Sync", 2), ("Async", 2)])
def test_an_interrupt_ends_everything(programs, notes, mode, workers):
    program = waiting(programs, mode, workers, notes)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    assert program.wait() == -signal.SIGINT
    assert program.errors.count("Traceback") == program.errors.count("KeyboardInterrupt") == 1
    check_nothing_is_left(program, notes)
