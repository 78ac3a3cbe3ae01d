"""Whatever happens in a worker, the main process gets an error in bounded time and nothing is left behind.

`pytest --long` repeats every fault 100 times instead of 5, or of 1 where every repetition starts a fresh Python.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import members

TESTS = Path(__file__).parent.parent
DRIVER = Path(__file__).parent / "fault_driver.py"
FAULTS = {
    "exception": "ValueError: a broken sample",
    "exit": "exited with code 3",
    "kill": "was killed by SIGKILL",
    "segfault": "was killed by SIGSEGV",
    "sleep": "is stalled: no batch for",
}
LIMIT_SECONDS = 10


def start(*arguments, **settings):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])}
    return subprocess.Popen(
        [sys.executable, str(DRIVER), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        **settings,
    )


def shared_memory():
    return {path.name for path in Path("/dev/shm").glob("*")}


def wait_for_end(session, seconds=LIMIT_SECONDS):
    """The processes that are left of a session when the time is over."""
    end = time.monotonic() + seconds
    while (left := members(session=session)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def outcomes(*arguments):
    """Run the driver to its end; nothing of it may be left."""
    before = shared_memory()
    driver = start(*arguments, stderr=subprocess.DEVNULL)
    printed, _ = driver.communicate(timeout=3600)
    assert driver.returncode == 0
    assert wait_for_end(driver.pid) == {}
    assert not {name for name in shared_memory() - before if str(driver.pid) in name or "poptorch" in name}
    return [json.loads(line) for line in printed.splitlines()]


def check(found, fault):
    assert FAULTS[fault] in found["error"]
    assert found["batches"] <= 2  # those before the fault, unless they died with the worker
    assert found["seconds"] < LIMIT_SECONDS
    assert found["left"] == {}


@pytest.mark.long
@pytest.mark.timeout(4000)
@pytest.mark.parametrize(
    ("mode", "start_method", "workers"),
    [
        ("Sync", "fork", 2),
        ("Sync", "spawn", 1),
        ("Async", "fork", 0),
        ("Async", "fork", 2),
        ("Async", "spawn", 0),
        ("AsyncRebatched", "fork", 2),
        ("AsyncRebatched", "spawn", 0),
    ],
)
def test_faults(mode, start_method, workers, request):
    usual = 1 if start_method == "spawn" else 5
    repeats = 100 if request.config.getoption("--long") else usual
    found = outcomes(mode, start_method, workers, repeats, *FAULTS)
    assert [outcome["fault"] for outcome in found] == [fault for fault in FAULTS for _ in range(repeats)]
    for outcome in found:
        check(outcome, outcome["fault"])


@pytest.mark.parametrize(("mode", "workers"), [("Sync", 2), ("Async", 2)])
def test_sleeping_forever_is_noticed_without_any_setting(mode, workers):
    (found,) = outcomes(mode, "fork", workers, 1, "sleep-by-default")
    check(found, "sleep")
    assert "idle all the time" in found["error"]
    assert "POPTORCH_DATA_TIMEOUT" in found["error"]


@pytest.mark.parametrize(("mode", "workers"), [("Sync", 2), ("Async", 0), ("Async", 2)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_main_process(mode, workers, number):
    driver = start(mode, "fork", workers, 1, "wait", stderr=subprocess.DEVNULL)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "waiting\n"
    assert len(members(session=driver.pid)) > 1
    driver.send_signal(number)
    driver.wait()
    assert wait_for_end(driver.pid) == {}
    driver.stdout.close()


@pytest.mark.parametrize(("mode", "workers"), [("Sync", 2), ("Async", 2)])
def test_an_interrupt_ends_everything(mode, workers):
    driver = start(mode, "fork", workers, 1, "wait", stderr=subprocess.PIPE)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "waiting\n"
    os.killpg(driver.pid, signal.SIGINT)  # as a terminal does
    _, complaints = driver.communicate(timeout=30)
    assert complaints.count("Traceback") == complaints.count("KeyboardInterrupt") == 1
    assert wait_for_end(driver.pid) == {}
