from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis.strategies import booleans, integers

from poptorch.data.share import Share, ShareSampler

SIZES = {"samples": integers(1, 300), "processes": integers(1, 7), "batch": integers(1, 9)}


def shares(samples, processes, batch, drop_last):
    assume(not drop_last or samples >= processes * batch)
    return [Share(samples, processes, process, batch, drop_last) for process in range(processes)]


@given(**SIZES, drop_last=booleans(), epoch=integers(0, 3))
def test_shares_are_disjoint_and_cover_what_is_not_left_over(samples, processes, batch, drop_last, epoch):
    found = shares(samples, processes, batch, drop_last)
    positions = [position for share in found for position in share.positions(epoch)]
    assert len(positions) == len(set(positions)) == samples - found[0].left_over
    assert set(positions) <= set(range(samples))


@given(**SIZES)
def test_all_have_the_same_number_of_whole_batches(samples, processes, batch):
    found = shares(samples, processes, batch, drop_last=True)
    assert {share.length for share in found} == {batch * (samples // (batch * processes))}


@given(**SIZES, drop_last=booleans(), seed=integers(0, 2**40))
def test_shuffled_shares_are_disjoint_and_cover_everything_in_two_epochs(samples, processes, batch, drop_last, seed):
    found = [ShareSampler(share, seed) for share in shares(samples, processes, batch, drop_last)]
    for _ in range(2):
        indices = [index for sampler in found for index in sampler]
        assert len(indices) == len(set(indices)) == sum(map(len, found))


@given(**SIZES)
def test_positions_left_out_alternate(samples, processes, batch):
    found = shares(samples, processes, batch, drop_last=True)
    assume(found[0].left_over <= processes * found[0].length)
    seen = {position for share in found for epoch in (0, 1) for position in share.positions(epoch)}
    assert seen == set(range(samples))


def test_every_process_draws_its_own_next_permutation():
    one, other = (ShareSampler(Share(10, 2, process, 5, True), seed=3) for process in (0, 1))
    first, second = list(one), list(one)
    assert sorted(first + list(other)) == list(range(10))
    assert first != second


def test_too_few_samples_for_all_processes():
    with pytest.raises(AssertionError, match="10 samples, but 3 processes need one combined batch of 4 each"):
        Share(10, 3, 0, 4, True)


@pytest.mark.parametrize("process", [-1, 2, 5])
def test_a_process_that_does_not_exist_has_no_share(process):
    with pytest.raises(AssertionError, match=f"no process {process} of 2"):
        Share(100, 2, process, 1, drop_last=True)
