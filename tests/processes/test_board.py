"""Nobody waits for a store that does not answer, and nobody asks it twice."""

from __future__ import annotations

import threading
import time

import pytest
from torch import distributed

from poptorch.processes.board import Board


class Silent:
    """A store behind a cable that was cut after the first answer."""

    def __init__(self):
        self.is_cut, self.asked = threading.Event(), []

    def set(self, name, text):
        self.asked.append(name)
        if len(self.asked) > 1:
            self.is_cut.wait(30)

    def get(self, name):
        self.asked.append(name)
        return b"text"


def test_an_access_that_is_not_answered_ends_and_is_the_last():
    store = Silent()
    board = Board(store, 0.3)
    board.write("one", "")
    begun = time.monotonic()
    with pytest.raises(distributed.DistNetworkError, match=r"did not answer within 0.3 s"):
        board.write("two", "")
    with pytest.raises(distributed.DistNetworkError, match="lost before"):
        board.read("three")
    assert time.monotonic() - begun < 20
    store.is_cut.set()
    assert store.asked == ["one", "two"]


def test_what_the_store_raises_reaches_the_caller():
    board = Board(distributed.HashStore(), 1.0)
    board.write("known", "text")
    assert board.read("known") == b"text"
    assert (board.has("known"), board.has("other")) == (True, False)
    with pytest.raises(AttributeError):
        Board(None, 1.0).read("known")
