from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from poptorch.data import patience
from poptorch.data.patience import Patience, Stopwatch, seconds_of_work
from poptorch.errors import DataError


class Clock:
    """Time and work as a test wants them."""

    def __init__(self, monkeypatch):
        self.now, self.work = 0.0, 0.0
        monkeypatch.setattr(patience.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(patience, "seconds_of_work", lambda pids: self.work)

    def first_verdict(self, watch, share, limit):
        """When patience ends, with workers that use this share of a core."""
        watch.has_started()
        while self.now < limit:
            verdict = watch.verdict()
            if verdict is not None:
                return self.now, verdict
            self.now += 0.25
            self.work += 0.25 * share
        return None


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_an_idle_worker_is_given_up_soon(clock):
    when, why = clock.first_verdict(Stopwatch(Patience(), lambda: []), share=0.0, limit=100)
    assert when <= 8
    assert "idle all the time" in why


@pytest.mark.parametrize("share", [0.02, 1.0])
def test_a_busy_worker_may_take_its_time(clock, share):
    when, why = clock.first_verdict(Stopwatch(Patience(), lambda: []), share=share, limit=5000)
    assert when == 3600
    assert why == "no batch for 3600.0 s"


def test_a_loop_of_short_sleeps_is_idle(clock):
    when, _ = clock.first_verdict(Stopwatch(Patience(), lambda: []), share=0.001, limit=100)
    assert when <= 8


def test_waiting_for_a_disk_is_work(clock):
    clock.work = float("inf")
    assert clock.first_verdict(Stopwatch(Patience(), lambda: []), share=0.0, limit=100) is None


def test_where_nobody_can_tell_only_the_long_limit_holds(clock, monkeypatch):
    monkeypatch.setattr(patience, "seconds_of_work", lambda pids: None)
    assert clock.first_verdict(Stopwatch(Patience(), lambda: []), share=0.0, limit=100) is None


def test_a_timeout_is_a_plain_limit(clock):
    when, _ = clock.first_verdict(Stopwatch(Patience.of(20), lambda: []), share=1.0, limit=100)
    assert when == 20


@pytest.mark.parametrize("patience", [Patience(), Patience.of(20)])
def test_time_in_which_the_program_was_stopped_does_not_count(clock, patience):
    watch = Stopwatch(patience, lambda: [])
    clock.now += 1
    assert watch.verdict() is None
    clock.now += 1000
    assert watch.verdict() is None
    when, _ = clock.first_verdict(watch, share=0.0, limit=2000)
    assert when - 1001 <= patience.idle + 1


def test_the_first_batch_may_take_as_long_as_starting_takes():
    assert Patience.of(1).at_start == Patience()
    assert Patience.of(5000).at_start == Patience(5000, 5000)


def test_the_environment_sets_the_default(monkeypatch):
    monkeypatch.setenv("POPTORCH_DATA_TIMEOUT", "60")
    assert Patience.of(0) == Patience(60, 60)
    assert Patience.of(5) == Patience(5, 5)
    monkeypatch.setenv("POPTORCH_DATA_TIMEOUT", "soon")
    with pytest.raises(DataError, match="POPTORCH_DATA_TIMEOUT='soon' is not a number of seconds"):
        Patience.of(0)


def test_a_timeout_is_not_negative():
    with pytest.raises(DataError, match="not -1"):
        Patience.of(-1)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_work_of_a_process_includes_its_children():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        end = time.monotonic() + 30
        while not (seconds_of_work([process.pid]) or 0) > 0.5:
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert seconds_of_work([process.pid]) == 0
