"""What a call did and when, and the latencies that follow from it."""

from __future__ import annotations

import pytest

from poptorch.executable import Commit, Run, Schedule
from poptorch.runtime import RunTrace, latency

SCHEDULE = Schedule((Run("micro_step", 0, 0, 0, 0), Run("micro_step", 0, 1, 0, 1), Commit(("update",), (0,), 2)), 2, 2)


def trace() -> RunTrace:
    """Two rounds of two micro-batches and an update, each instruction from one full second to the next half."""
    begins = tuple(float(second) for second in range(1, 7))
    return RunTrace(SCHEDULE, 0.5, begins, tuple(begin + 0.5 for begin in begins), 9.0)


def test_spans_say_what_ran_on_which_micro_batch_and_when():
    spans = [(str(s.instruction), s.replica, s.micro_batch, s.begin, s.end) for s in trace().spans]
    assert spans == [
        ("micro_step 0", 0, 0, 1.0, 1.5),
        ("micro_step 1", 0, 1, 2.0, 2.5),
        ("update", None, None, 3.0, 3.5),
        ("micro_step 0", 0, 2, 4.0, 4.5),
        ("micro_step 1", 0, 3, 5.0, 5.5),
        ("update", None, None, 6.0, 6.5),
    ]


def test_moments_of_micro_batches():
    assert trace().started == [1.0, 2.0, 4.0, 5.0]
    assert trace().finished == [1.5, 2.5, 4.5, 5.5]
    assert trace().requested == [0.5, 1.5, 2.5, 4.5]
    assert trace().seconds == 8.5


def test_a_trace_is_a_value():
    assert trace() == trace()
    with pytest.raises(AttributeError):
        trace().begun = 3.0


def test_latency_is_least_most_and_mean():
    assert latency([0.0, 1.0], [2.0, 5.0]) == (2.0, 4.0, 3.0)


def test_an_end_for_several_starts_counts_from_the_earliest():
    assert latency([0.0, 1.0, 2.0, 3.0], [4.0, 8.0]) == (4.0, 6.0, 5.0)


def test_without_moments_there_is_no_latency():
    assert latency([], []) == (0.0, 0.0, 0.0)
