"""Timelines: laws that hold for every number of sections and micro-batches, and how tables look."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, integers, lists

from poptorch.compiler.timelines import Plan, phased, pipelined, sharded
from poptorch.executable import Kind, Task, Timeline

SECTIONS, MICRO_BATCHES = integers(1, 8), integers(1, 32)


def count(timeline, kind):
    return sum(task.kind is kind for task in timeline.tasks)


@given(SECTIONS, MICRO_BATCHES, booleans(), booleans())
def test_a_pipeline_runs_every_part_once_and_in_order(sections, micro_batches, training, recomputes):
    timeline = pipelined(Plan(tuple(range(sections)), micro_batches, training, recomputes))  # which verifies itself
    assert count(timeline, Kind.FORWARD) == sections * micro_batches
    assert count(timeline, Kind.BACKWARD) == training * sections * micro_batches
    assert count(timeline, Kind.RECOMPUTE) == (training and recomputes) * (sections - 1) * micro_batches
    assert count(timeline, Kind.UPDATE) == training * sections


@given(SECTIONS, MICRO_BATCHES)
def test_a_pipeline_for_inference_takes_as_long_as_filling_and_draining_it(sections, micro_batches):
    timeline = pipelined(Plan(tuple(range(sections)), micro_batches, training=False))
    assert timeline.slots == micro_batches + sections - 1
    assert timeline.bubble_share == pytest.approx(1 - micro_batches / (micro_batches + sections - 1))


@given(SECTIONS, MICRO_BATCHES)
def test_a_section_keeps_as_many_micro_batches_as_are_between_its_forward_and_backward_part(sections, micro_batches):
    timeline = pipelined(Plan(tuple(range(sections)), micro_batches, training=True))
    for section in range(sections):
        assert timeline.peak_stash(section) == min(micro_batches, 2 * (sections - 1 - section) + 1)


@given(SECTIONS, MICRO_BATCHES, booleans())
def test_shards_work_one_at_a_time(sections, micro_batches, training):
    timeline = sharded(Plan(tuple(range(sections)), micro_batches, training))
    busy = [task.slot for task in timeline.tasks if task.kind is not Kind.UPDATE]
    assert len(set(busy)) == len(busy)
    assert all(timeline.peak_stash(section) <= 1 for section in range(sections))


@given(lists(integers(0, 3), min_size=1, max_size=8), MICRO_BATCHES, booleans(), booleans())
def test_phases_do_not_overlap(ipus, micro_batches, training, recomputes):
    phases = [section // 2 for section in range(len(ipus))]
    timeline = phased(Plan(tuple(ipus), micro_batches, training, recomputes), phases)
    slots = {phase: [] for phase in phases}
    for task in timeline.tasks:
        if task.kind is Kind.FORWARD:
            slots[phases[task.section]].append(task.slot)
    assert all(max(slots[a]) < min(slots[b]) for a, b in zip(slots, list(slots)[1:], strict=False))


def test_ipus_may_have_several_sections():
    timeline = pipelined(Plan((0, 1, 2, 1), 4, training=False))
    assert timeline.ipus == (0, 1, 2)


def test_a_pipeline_prints_as_a_table(golden):
    golden.check(str(pipelined(Plan((0, 1), 3, training=True))))


def test_a_recomputing_pipeline_prints_as_a_table(golden):
    golden.check(str(pipelined(Plan((0, 1, 2, 3), 7, training=True, recomputes=True))))


def test_phases_print_as_a_table(golden):
    golden.check(str(phased(Plan((0, 1, 0, 1), 2, training=True), [0, 0, 1, 1])))


@pytest.mark.parametrize(
    ("tasks", "complaint"),
    [
        ([Task(Kind.FORWARD, 0, 0, 0, 0), Task(Kind.FORWARD, 1, 0, 0, 0)], "one thing at a time"),
        ([Task(Kind.FORWARD, 0, 0, 0, 1), Task(Kind.FORWARD, 1, 0, 1, 1)], "before what it needs"),
        ([Task(Kind.FORWARD, 0, 0, 0, 0), Task(Kind.FORWARD, 0, 0, 0, 1)], "runs twice"),
        ([Task(Kind.FORWARD, 0, 0, 0, 0)], "visits every section"),
    ],
)
def test_a_wrong_timeline_cannot_be_made(tasks, complaint):
    with pytest.raises(AssertionError, match=complaint):
        Timeline(tuple(tasks), sections=2, micro_batches=1)
