"""A schedule is a value: it prints as a table, compares, and refuses what no machine could do."""

from __future__ import annotations

import pytest

from poptorch.executable import Commit, Run, Schedule


def two_replicas() -> Schedule:
    """Two micro-batches on each of two replicas, then an update."""
    runs = [Run("micro_step", index % 2, index, index % 2, index // 2) for index in range(4)]
    return Schedule((*runs, Commit(("update",), (0, 1), 2)), rounds=3, micro_batches=4)


def test_prints_as_a_table_of_ipus_and_slots():
    assert str(two_replicas()).splitlines() == [
        "schedule, 3 times:",
        "         slot 0        slot 1        slot 2",
        "  IPU 0  micro_step 0  micro_step 2  update",
        "  IPU 1  micro_step 1  micro_step 3  update",
    ]


def test_equal_schedules_are_equal():
    assert two_replicas() == two_replicas()
    assert hash(two_replicas()) == hash(two_replicas())


def test_what_a_commit_can_still_take_back_is_revocable():
    assert two_replicas().is_revocable
    assert not Schedule((Run("step", 0, 0, 0, 0, commits=True),), rounds=1, micro_batches=1).is_revocable


@pytest.mark.parametrize(
    ("instructions", "text"),
    [
        ((Run("a", 0, 0, 0, 0), Run("b", 0, 0, 0, 0), Commit((), (0,), 1)), "one thing at a time"),
        ((Run("a", 0, 5, 0, 0, commits=True),), "no such micro-batch"),
        ((Commit((), (0,), 0), Run("a", 0, 0, 0, 1)), "a round ends"),
        ((Run("a", 0, 0, 0, 0, commits=True), Commit((), (0,), 1)), "commits by itself"),
    ],
)
def test_impossible_schedules_are_refused(instructions, text):
    with pytest.raises(AssertionError, match=text):
        Schedule(instructions, rounds=1, micro_batches=1)
