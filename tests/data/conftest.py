"""No test of a loader may leave a process behind."""

from __future__ import annotations

import gc
import multiprocessing

import pytest


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    if multiprocessing.active_children():
        gc.collect()  # a traceback may hold a loader; searching for it takes long, so only if need be
    assert multiprocessing.active_children() == []
