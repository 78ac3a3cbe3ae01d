"""The work of several IPUs at the same time: no thread outlives the call."""

from __future__ import annotations

import threading
import time

import pytest

from poptorch.runtime.threads import run_threads


def alive():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("IPU")]


def test_ipus_work_at_the_same_time():
    met = threading.Barrier(2, timeout=30)
    run_threads([met.wait, met.wait], lambda: None)
    assert not alive()


def test_what_one_raises_ends_all():
    given_up = threading.Event()

    def fail():
        raise ValueError("on IPU 0")

    with pytest.raises(ValueError, match="on IPU 0"):
        run_threads([fail, lambda: given_up.wait(30)], given_up.set)
    assert not alive()


def test_the_first_exception_counts():
    def later():
        time.sleep(0.2)
        raise KeyError("later")

    def first():
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        run_threads([later, first], lambda: None)
