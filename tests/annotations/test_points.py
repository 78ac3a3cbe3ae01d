"""`fps` and `nearest`: against the plainest way to compute them, in compiled models and outside."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import poptorch


def farthest(src, ptr, ratio):
    """One point after the other, with all distances computed anew each time."""
    chosen = []
    for first, end in pairwise(ptr):
        points = src[first:end].double().tolist()
        taken = [0] if points else []
        while len(taken) < math.ceil(len(points) * ratio - 1e-5):
            distances = [min(math.dist(p, points[t]) for t in taken) for p in points]
            taken.append(distances.index(max(distances)))
        chosen += [first + index for index in taken]
    return chosen


class Samples(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.arguments = arguments

    def forward(self, src):
        return poptorch.fps(src, **self.arguments)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("ptr", [[0, 20], [0, 7, 8, 20], [3, 3, 11]])
def test_fps_takes_the_farthest_points_of_each_segment(ptr, ratio):
    src = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    expected = farthest(src, ptr, ratio)
    assert poptorch.fps(src, ptr, ratio).tolist() == expected
    assert poptorch.inferenceModel(Samples(ptr=ptr, ratio=ratio))(src).tolist() == expected


@pytest.mark.inductor
def test_fps_in_native_code(engine):
    src = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    run = poptorch.inferenceModel(Samples(ptr=[0, 9, 20], ratio=0.4), poptorch.Options().engine(engine))
    for points in (src, src.flip(0)):
        assert run(points).tolist() == farthest(points, [0, 9, 20], 0.4)


def test_fps_takes_the_first_of_equal_points_and_rounds_shares_as_they_are_written():
    src = torch.tensor([[0.0], [1.0], [-1.0], [1.0]])
    assert poptorch.fps(src, [0, 4], 1.0).tolist() == [0, 1, 2, 0]
    assert len(poptorch.fps(torch.randn(100, 1), [0, 100], 0.07)) == 7  # in float64, 0.07 * 100 is more than 7


def test_a_random_start_gives_all_points_in_another_order():
    src, ptr = torch.randn(30, 2), [0, 10, 30]
    run = poptorch.inferenceModel(Samples(ptr=ptr, ratio=1.0, random_start=True))
    found = [run(src) for _ in range(5)]
    assert all(set(order[:10].tolist()) == set(range(10)) for order in found)
    assert all(set(order[10:].tolist()) == set(range(10, 30)) for order in found)
    assert len({tuple(order.tolist()) for order in found}) > 1


@pytest.mark.inductor
def test_fps_chooses_rows_in_training(engine):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            hidden = self.fc(x)
            chosen = hidden[poptorch.fps(hidden, [0, 8], 0.25)]
            return chosen, poptorch.identity_loss(chosen.square(), "sum")

    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 3)
    weight = model.fc.weight.detach().clone().requires_grad_()
    hidden = x @ weight.T + model.fc.bias.detach()
    expected = hidden[farthest(hidden, [0, 8], 0.25)]
    expected.square().sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen, _ = poptorch.trainingModel(model, poptorch.Options().engine(engine), optimizer)(x)
    torch.testing.assert_close(chosen, expected.detach())
    torch.testing.assert_close(model.fc.weight.detach(), (weight - 0.1 * weight.grad).detach())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([[1.0]], [0, 1]), "src of fps is a list"),
        ((torch.ones(()), [0, 1]), "src of fps is one number"),
        ((torch.ones(2, 2), [0]), r"ptr of fps is \[0\]"),
        ((torch.ones(2, 2), torch.tensor([0, 2])), "ptr of fps is tensor"),
        ((torch.ones(2, 2), [0, 2.0]), "ptr of fps is"),
        ((torch.ones(2, 2), [0, 3]), "must rise, from 0 to 2"),
        ((torch.ones(2, 2), [2, 0]), "must rise"),
        ((torch.ones(2, 2), [0, 2], 1.5), "ratio of fps is 1.5"),
    ],
)
def test_fps_refuses_wrong_arguments(arguments, text):
    with pytest.raises(poptorch.Error, match=text):
        poptorch.fps(*arguments)


def closest(x, y, batch_x, batch_y):
    """For each point the first of the closest ones, one pair after the other."""
    found = []
    for point, batch in zip(x.double().tolist(), batch_x, strict=True):
        among = [index for index, other in enumerate(batch_y) if other == batch]
        found.append(min(among, key=lambda index, point=point: math.dist(point, y[index].double().tolist())))
    return found


class Nearest(nn.Module):
    """Batches are given when the model is made, as lists, or to forward, as tensors."""

    def __init__(self, batch_x=None, batch_y=None):
        super().__init__()
        self.batch_x, self.batch_y = batch_x, batch_y

    def forward(self, x, y, batch_x=None, batch_y=None):
        return poptorch.nearest(x, y, self.batch_x or batch_x, self.batch_y or batch_y)


BATCH_X, BATCH_Y = [0, 0, 0, 1, 1, 3, 3], [0, 1, 1, 3, 3]


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_nearest_of_the_same_batch(engine, dtype):
    torch.manual_seed(0)
    x, y = torch.randn(7, 3).to(dtype), torch.randn(5, 3).to(dtype)
    options = poptorch.Options().engine(engine)
    expected = closest(x, y, BATCH_X, BATCH_Y)
    assert poptorch.nearest(x, y, BATCH_X, BATCH_Y).tolist() == expected
    run = poptorch.inferenceModel(Nearest(BATCH_X, BATCH_Y), options)
    assert run(x, y).tolist() == expected


def test_batches_may_be_lists_or_tensors_or_missing():
    torch.manual_seed(0)
    x, y = torch.randn(7, 3), torch.randn(5, 3)
    as_x, as_y = torch.tensor(BATCH_X), torch.tensor(BATCH_Y)
    expected = closest(x, y, BATCH_X, BATCH_Y)
    assert poptorch.inferenceModel(Nearest())(x, y, as_x, as_y).tolist() == expected
    assert poptorch.nearest(x, y, BATCH_X, as_y).tolist() == expected
    assert poptorch.nearest(x, y, as_x, BATCH_Y).tolist() == expected
    zeros = closest(x, y, [0] * 7, [0] * 5)
    assert poptorch.inferenceModel(Nearest())(x, y).tolist() == zeros
    assert poptorch.nearest(x, y, [0] * 7).tolist() == zeros
    assert poptorch.nearest(x, y, None, [0] * 5).tolist() == zeros
    only_first = closest(x, y, [0] * 7, BATCH_Y)
    assert poptorch.nearest(x, y, None, as_y).tolist() == only_first


def test_single_numbers_are_points_and_the_first_of_equals_is_taken():
    x, y = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([2.0, 0.0, 4.0, 6.0])
    assert poptorch.inferenceModel(Nearest())(x, y).tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.ones(3), torch.ones(2), [0, 1, 0], [0, 1]), r"batch_x of nearest is \[0, 1, 0\]: it must be sorted"),
        ((torch.ones(2), torch.ones(2), [0, 1], [0, 0]), "batch 1 of nearest has points in only one"),
        ((torch.ones(2), torch.ones(2), [0, 1]), "batch 1 of nearest has points in only one"),
        ((torch.ones(3), torch.ones(2), [0, 0], [0, 0]), "batch_x of nearest has 2 items for 3 points"),
        ((torch.ones(3, 1, 1), torch.ones(2)), "one row for each point"),
        ((torch.ones(3, 1), torch.ones(3, 2)), "points of x have 1 numbers, and points of y have 2"),
    ],
)
def test_nearest_refuses_what_does_not_fit_together(arguments, text):
    with pytest.raises(ValueError, match=text):
        poptorch.nearest(*arguments)


@pytest.mark.parametrize("arguments", [([1.0], torch.ones(1)), (torch.ones(1), 3)])
def test_nearest_takes_tensors(arguments):
    with pytest.raises(poptorch.Error, match="of nearest is a"):
        poptorch.nearest(*arguments)
