"""Indices in the bodies of loops and branches: what is out of range is told by the program around them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from poptorch.compiler.bounds import check_indices
from poptorch.ir import verify
from poptorch.ir.ranges import WITHIN


class Table(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.rows = nn.Embedding(4, 2)

    def forward(self, *tensors):
        return self.function(self, *tensors)


def compiled(function):
    return poptorch.inferenceModel(Table(function), poptorch.Options())


def walk(model, place):
    """Look up one row after the other."""
    return poptorch.for_loop(3, lambda place, total: (place + 1, total + model.rows(place)), [place, torch.zeros(1, 2)])


def walk_while(model, place):
    return torch.while_loop(
        lambda place, total: place.sum() < 6,
        lambda place, total: (place + 1, total + model.rows(place)),
        (place, torch.zeros(1, 2)),
    )


def nested(model, place):
    return poptorch.cond(place.sum() >= 0, lambda: walk(model, place), [], lambda: (place * 1, torch.zeros(1, 2)), [])


@pytest.mark.parametrize("function", [walk, nested])
def test_the_first_index_out_of_range_is_told_with_its_line(function):
    model = compiled(function)
    expected = Table(function)(torch.tensor([1]))
    torch.testing.assert_close(model(torch.tensor([1]))[1], expected[1].detach())
    with pytest.raises(IndexError, match=r"the index 4, but embedding takes 0 to 3") as raised:
        model(torch.tensor([3]))  # the next would be 5
    assert "test_guarded_bodies.py" in str(raised.value)
    torch.testing.assert_close(model(torch.tensor([1]))[1], expected[1].detach())


def test_an_index_in_a_loop_that_stops_when_it_wants():
    model = compiled(walk_while)
    with pytest.raises(IndexError, match="the index 4"):
        model(torch.tensor([2]))
    assert torch.equal(model(torch.tensor([7]))[1], torch.zeros(1, 2))  # which never runs


def test_an_index_of_the_branch_that_is_not_chosen_does_not_count():
    model = compiled(nested)
    assert torch.equal(model(torch.tensor([-9]))[1], torch.zeros(1, 2))


def test_an_unsafe_index_in_a_condition_is_refused():
    def forward(model, place):
        return torch.while_loop(lambda place: model.rows(place).sum() < 9, lambda place: (place + 1,), (place,))

    with pytest.raises(poptorch.Error, match="the condition of a loop uses an index that may be out of range"):
        compiled(forward)(torch.tensor([1]))


def test_indices_that_are_known_to_be_in_range_need_no_guard():
    def forward(model, place):
        return poptorch.for_loop(3, lambda place: (place + 1) * model.rows(place % 4).sum().ge(0).long(), [place])

    model = compiled(forward)
    model(torch.tensor([1]))
    graph = model._executable.step.graph
    assert not graph.guards
    again, checks = check_indices(graph)
    verify(again)
    assert not checks
    assert not any(node.target is WITHIN for inner in again.graphs.values() for node in inner.ops.nodes)
