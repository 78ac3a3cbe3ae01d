"""Python looks for garbage later or less often while a model is made, and as before afterwards."""

from __future__ import annotations

import gc

import pytest

from poptorch.model.garbage import collecting_later, collecting_rarely


@pytest.fixture(autouse=True)
def settings():
    """Whatever a test changes is as it was afterwards."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.enable()


def test_nothing_is_collected_inside_even_if_it_fails():
    seen = []

    def fail():
        seen.append(gc.isenabled())
        raise KeyError

    with pytest.raises(KeyError), collecting_later():
        fail()
    assert (seen, gc.isenabled()) == ([False], True)


def test_a_program_that_has_switched_it_off_finds_it_off():
    gc.disable()
    with collecting_later():
        pass
    assert not gc.isenabled()


def test_fewer_looks_inside_and_as_many_as_before_afterwards():
    gc.set_threshold(700, 30, 10)
    with collecting_rarely():
        assert gc.get_threshold() == (50_000, 30, 100)
    assert gc.get_threshold() == (700, 30, 10)


def test_a_threshold_of_none_stays_none():
    gc.set_threshold(0)
    with collecting_rarely():
        assert gc.get_threshold()[0] == 0
