"""No test of a loader may leave a process behind."""

from __future__ import annotations

import gc
import multiprocessing

import pytest


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    gc.collect()  # a traceback may hold a loader
    assert multiprocessing.active_children() == []
