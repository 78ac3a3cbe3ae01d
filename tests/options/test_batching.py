"""Batch arithmetic: laws that hold for all sizes, and the numbers of worked examples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import poptorch
from poptorch import CommGroupType, OutputMode
from poptorch.options import BatchPlan

small = st.integers(1, 6)


@st.composite
def plans(draw, modes=(OutputMode.All, OutputMode.Final, OutputMode.Sum, OutputMode.EveryN)):
    mode = draw(st.sampled_from(modes))
    period = draw(small) if mode is OutputMode.EveryN else 1
    iterations = period * draw(small) if mode is OutputMode.EveryN else draw(small)
    return BatchPlan(iterations, draw(small), draw(small), mode, period)


@given(plans())
def test_one_call_uses_every_micro_batch(plan):
    assert plan.micro_batches == plan.device_iterations * plan.gradient_accumulation * plan.replicas
    assert plan.micro_batches_per_update * plan.device_iterations == plan.micro_batches


@given(plans())
def test_returned_micro_batches_are_in_order_and_exist(plan):
    assert list(plan.kept) == sorted(set(plan.kept))
    assert set(plan.kept) <= set(range(plan.micro_batches))


@given(plans(modes=(OutputMode.All, OutputMode.Sum)))
def test_all_and_sum_use_each_micro_batch_once(plan):
    assert plan.kept == tuple(range(plan.micro_batches))


@given(plans(modes=(OutputMode.Final,)))
def test_final_returns_the_last_micro_batch_of_each_replica(plan):
    assert [index % plan.replicas for index in plan.kept] == list(range(plan.replicas))
    assert plan.kept[-1] == plan.micro_batches - 1


@given(plans(modes=(OutputMode.EveryN,)))
def test_every_n_returns_whole_device_iterations_the_last_one_included(plan):
    iterations = [index // plan.micro_batches_per_update for index in plan.kept]
    assert sorted(set(iterations)) == list(range(plan.output_period - 1, plan.device_iterations, plan.output_period))
    assert all(iterations.count(d) == plan.micro_batches_per_update for d in iterations)


@given(plans())
def test_copies_follow_the_output_mode(plan):
    expected = {
        OutputMode.All: plan.micro_batches,
        OutputMode.EveryN: plan.micro_batches // plan.output_period,
        OutputMode.Final: plan.replicas,
        OutputMode.Sum: plan.replicas,
    }
    assert plan.output_copies == expected[plan.output_mode]


@given(plans(), st.integers(0, 20))
def test_rows_divide_evenly_or_the_error_shows_the_arithmetic(plan, rows):
    if rows % plan.micro_batches == 0:
        assert plan.rows_per_micro_batch("x", (rows, 3)) * plan.micro_batches == rows
        return
    with pytest.raises(AssertionError) as caught:
        plan.rows_per_micro_batch("x", (rows, 3))
    text = str(caught.value)
    assert f"[{rows}, 3]" in text
    for number in (plan.device_iterations, plan.gradient_accumulation, plan.replicas, plan.micro_batches):
        assert str(number) in text


def test_tensor_without_dimensions_counts_as_one_row():
    assert BatchPlan(1, 1, 1, OutputMode.All, 1).rows_per_micro_batch("x", ()) == 1
    with pytest.raises(poptorch.Error, match="x"):
        BatchPlan(2, 1, 1, OutputMode.All, 1).rows_per_micro_batch("x", ())


@pytest.mark.parametrize(("iterations", "period"), [(4, 3), (4, 8), (1, 2)])
def test_period_that_does_not_divide_the_iterations_is_refused(iterations, period):
    with pytest.raises(poptorch.Error, match=rf"{period}(.|\n)*{iterations}"):
        BatchPlan(iterations, 1, 1, OutputMode.EveryN, period)


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-2, 1, 1)])
def test_counts_below_one_are_refused(counts):
    with pytest.raises(poptorch.Error, match="at least 1"):
        BatchPlan(*counts, OutputMode.All, 1)


# D, G, R, mode, period → rows of a call with two rows per micro-batch, copies of each output
WORKED = [
    (1, 1, 1, OutputMode.All, 1, 2, 1),
    (10, 1, 1, OutputMode.All, 1, 20, 10),
    (10, 1, 1, OutputMode.Final, 1, 20, 1),
    (10, 1, 1, OutputMode.Sum, 1, 20, 1),
    (10, 1, 1, OutputMode.EveryN, 5, 20, 2),
    (4, 1, 2, OutputMode.All, 1, 16, 8),
    (1, 8, 1, OutputMode.Final, 1, 16, 1),
    (4, 8, 1, OutputMode.All, 1, 64, 32),
    (4, 8, 2, OutputMode.Final, 1, 128, 2),
    (4, 8, 2, OutputMode.Sum, 1, 128, 2),
    (4, 8, 2, OutputMode.EveryN, 2, 128, 32),
    (4, 8, 2, OutputMode.All, 1, 128, 64),
]


@pytest.mark.parametrize(("d", "g", "r", "mode", "period", "rows", "copies"), WORKED)
def test_worked_examples(d, g, r, mode, period, rows, copies):
    plan = BatchPlan(d, g, r, mode, period)
    assert plan.rows_per_micro_batch("x", (rows, 3)) == 2
    assert plan.output_copies == copies


grouped = st.builds(
    lambda d, g, groups, size, kind: BatchPlan(d, g, groups * size, OutputMode.All, 1, size, kind),
    small,
    small,
    small,
    small,
    st.sampled_from([CommGroupType.Consecutive, CommGroupType.Orthogonal]),
)


@given(grouped)
def test_replicas_of_a_group_are_fed_the_same_rows_and_others_different_ones(plan):
    assert len(plan.sources) == plan.micro_batches
    assert set(plan.sources) == set(range(plan.input_batches))
    assert plan.input_batches * plan.input_group_size == plan.micro_batches
    first = plan.sources[: plan.replicas]
    assert all(first.count(source) == plan.input_group_size for source in first)
    steps = [plan.sources[start : start + plan.replicas] for start in range(0, plan.micro_batches, plan.replicas)]
    assert steps == [tuple(index * plan.input_groups + s for s in first) for index in range(len(steps))]


@pytest.mark.parametrize(
    ("kind", "sources"),
    [(CommGroupType.Consecutive, (0, 0, 0, 0, 1, 1, 1, 1)), (CommGroupType.Orthogonal, (0, 1, 0, 1, 0, 1, 0, 1))],
)
def test_groups_of_eight_replicas(kind, sources):
    plan = BatchPlan(1, 1, 8, OutputMode.All, 1, 4, kind)
    assert plan.sources == sources
    assert plan.rows_per_micro_batch("x", (4, 3)) == 2
    assert plan.output_copies == 8


def test_without_groups_every_micro_batch_has_its_own_rows():
    plan = BatchPlan(2, 3, 4, OutputMode.All, 1)
    assert plan.sources == tuple(range(24))


def test_groups_that_do_not_divide_the_replicas_are_refused():
    with pytest.raises(poptorch.Error, match=r"groups of 3(.|\n)*4 replicas"):
        BatchPlan(1, 1, 4, OutputMode.All, 1, 3)
    with pytest.raises(AssertionError, match="inputReplicaGrouping 2"):
        BatchPlan(1, 1, 4, OutputMode.All, 1, 2).rows_per_micro_batch("x", (3,))
