"""Stretches of a sequence that repeat are found, whatever stands around them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from poptorch.engines.passes.repeats import Repeat, find_repeats

distinct = st.lists(st.integers(0, 10**6), min_size=1, max_size=12, unique=True)


@given(distinct, st.integers(3, 9), st.integers(0, 5), st.integers(0, 5))
def test_a_repeated_list_is_found_with_its_period(period, count, before, after):
    items = [*range(-before, 0), *period * count, *range(-100, -100 + after)]
    assert find_repeats(items, 3) == [Repeat(before, before + count * len(period), len(period))]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(2, 4))
def test_every_repeat_is_one_and_none_overlap(items, fewest):
    found = find_repeats(items, fewest)
    for repeat in found:
        assert repeat.length >= fewest * repeat.period
        stretch = items[repeat.start : repeat.end]
        assert stretch[repeat.period :] == stretch[: -repeat.period]
    assert all(one.end <= other.start for one, other in pairwise(found))


@given(distinct)
def test_items_that_all_differ_do_not_repeat(items):
    assert find_repeats(items, 2) == []


def test_a_part_that_occurs_often_in_a_period_does_not_hide_it():
    layer = [0, 0, 1, 0, 2, 0, 0, 3]
    assert find_repeats([9, *layer * 6, 8], 4) == [Repeat(1, 49, 8)]


def test_a_layer_of_equal_halves_repeats_by_halves():
    assert find_repeats([1, 2, 1, 2] * 5, 4) == [Repeat(0, 20, 2)]


def test_two_runs_with_something_between_are_two_repeats():
    found = find_repeats([*[1, 2, 3] * 5, 7, *[4, 5] * 6], 4)
    assert found == [Repeat(0, 15, 3), Repeat(16, 28, 2)]
