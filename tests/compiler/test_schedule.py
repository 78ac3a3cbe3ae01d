"""The order in which a call runs its programs follows from the batch plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poptorch.compiler.schedule import plan_schedule, with_reduction
from poptorch.enums import OutputMode
from poptorch.executable import Commit, Reduce
from poptorch.options import BatchPlan, ProcessSettings

counts = st.integers(1, 5)


def plan(iterations: int, accumulated: int, replicas: int) -> BatchPlan:
    return BatchPlan(iterations, accumulated, replicas, OutputMode.All, 1)


@given(counts, counts, counts)
def test_every_micro_batch_runs_once_on_its_replica_before_the_update(iterations, accumulated, replicas):
    batches = plan(iterations, accumulated, replicas)
    schedule = plan_schedule("micro_step", ("update",), batches, waits=True)
    assert [run.micro_batch for run in schedule.runs] == list(range(accumulated * replicas))
    assert all(run.replica == run.ipu == run.micro_batch % replicas for run in schedule.runs)
    assert isinstance(schedule.instructions[-1], Commit)
    assert schedule.rounds * schedule.micro_batches == batches.micro_batches


@given(counts, counts)
def test_replicas_work_at_the_same_time(accumulated, replicas):
    schedule = plan_schedule("micro_step", ("update",), plan(1, accumulated, replicas), waits=True)
    assert schedule.slots == accumulated + 1
    assert schedule.ipus == replicas


def test_what_need_not_wait_commits_by_itself():
    schedule = plan_schedule("step", (), plan(4, 1, 1), waits=False)
    assert [str(instruction) for instruction in schedule.instructions] == ["step 0"]
    assert schedule.runs[0].commits
    assert schedule.rounds == 4


@pytest.mark.parametrize("is_wide", [False, True])
def test_gradients_are_reduced_once_for_each_update_between_the_last_run_and_the_commit(is_wide):
    alone = plan_schedule("step", ("update",), plan(3, 2, 2), waits=True, is_wide=is_wide)
    schedule = with_reduction(alone, ("a", "b"), ProcessSettings(1, 4, in_order=True), averages=True)
    *runs, reduce, commit = schedule.instructions
    assert tuple(runs) == alone.runs
    assert isinstance(commit, Commit)
    assert reduce == schedule.reduction == Reduce(("a", "b"), 4, commit.ipus, commit.slot - 1, True, True)
    assert (schedule.rounds, schedule.micro_batches) == (alone.rounds, alone.micro_batches)
    assert "reduce 2 over 4 processes in order" in str(schedule)
