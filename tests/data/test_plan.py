from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

import poptorch
from poptorch.data.plan import plan_loading
from poptorch.enums import DataLoaderMode

SMALL = integers(1, 7)


def options_of(d=1, r=1, g=1):
    options = poptorch.Options().deviceIterations(d).replicationFactor(r)
    options.Training.gradientAccumulation(g)
    return options


def plan(options=None, batch_size=1, drop_last=True, mode=DataLoaderMode.Sync, worker_size=None, sampler=None):
    return plan_loading(
        options or options_of(),
        batch_size=batch_size,
        drop_last=drop_last,
        mode=mode,
        rebatched_worker_size=worker_size,
        batch_sampler=sampler,
    )


@given(b=SMALL, d=SMALL, r=SMALL, g=SMALL)
def test_combined_batch_is_what_one_call_takes(b, d, r, g):  # statement 12
    assert plan(options_of(d, r, g), batch_size=b).combined_batch_size == b * d * r * g


def test_replicas_of_a_group_share_their_rows():  # statement 12
    options = options_of(d=3, r=4)
    options.inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    assert plan(options, batch_size=5).combined_batch_size == 5 * 3 * 2


def test_no_batch_size_means_no_combined_batch():
    assert plan(batch_size=None, drop_last=False).combined_batch_size is None


@given(b=SMALL, d=SMALL, mode=sampled_from(DataLoaderMode), drop_last=sampled_from([True, False]))
def test_someone_takes_care_of_the_remainder(b, d, mode, drop_last):
    found = plan(options_of(d), batch_size=b, mode=mode, drop_last=drop_last)
    is_async = mode is DataLoaderMode.AsyncRebatched or (mode is DataLoaderMode.Async and not drop_last)
    assert found.rebatched_size == (b * d if is_async and b * d > 1 else None)
    assert found.torch_drops_last == (drop_last and found.rebatched_size is None)


def test_workers_load_as_much_as_asked_for_when_rebatched():
    assert plan(batch_size=4, mode=DataLoaderMode.AsyncRebatched, worker_size=3).fetch_size == 3
    assert plan(batch_size=4, mode=DataLoaderMode.Async, worker_size=3).fetch_size == 4


def test_workers_cannot_load_more_than_a_batch():  # statement 33
    with pytest.raises(AssertionError, match=r"rebatched_worker_size is 5.* combined batch size 4"):
        plan(batch_size=4, mode=DataLoaderMode.AsyncRebatched, worker_size=5)


def test_a_batch_sampler_decides_the_size():
    class Sampler:
        batch_size = 6

    found = plan(options_of(d=5), sampler=Sampler())
    assert (found.combined_batch_size, found.group_size, found.torch_drops_last) == (30, 5, False)


@pytest.mark.parametrize("size", [0, -1, 2.5, "four"])
def test_a_batch_has_rows(size):
    with pytest.raises(AssertionError, match=f"batch_size is {size!r}"):
        plan(batch_size=size)
