"""A call that fails leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from model.executors import assert_same, batch, snapshot, train
from models import Gate, Regression


def assert_untouched(module, optimizer, call, error, text) -> None:
    """A failed call raises `error` and changes neither module nor optimiser."""
    before = snapshot(module, optimizer)
    types = {name: type(value) for name, value in vars(module).items()}
    with pytest.raises(error, match=text):
        call()
    assert_same(before, snapshot(module, optimizer))
    assert {name: type(value) for name, value in vars(module).items()} == types
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("counts", [{}, {"D": 2, "G": 2}], ids=["D1", "D2G2"])
@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (lambda rows: batch(rows * 2), "Shape mismatch"),
        (lambda rows: (batch(rows)[0].half(), batch(rows)[1]), "torch.float16"),
    ],
    ids=["shape", "dtype"],
)
def test_bad_input_after_compiling_leaves_everything_as_it_was(bad, text, counts):
    model = Regression()
    optimizer = torch.optim.Adam(model.parameters())
    training = train(model, optimizer, **counts)
    training(*batch(8))
    assert_untouched(model, optimizer, lambda: training(*bad(8)), poptorch.Error, text)
    training(*batch(8))


def test_bad_shape_in_the_first_call_leaves_everything_as_it_was():
    model = Regression()
    optimizer = torch.optim.Adam(model.parameters())
    training = train(model, optimizer)
    bad = lambda: training(torch.randn(4, 7), torch.randn(4, 2))  # noqa: E731
    assert_untouched(model, optimizer, bad, RuntimeError, "mat1 and mat2|shape|size")
    assert not training.isCompiled()
    training(*batch())


def test_exception_in_forward_is_the_users_own_and_leaves_everything_as_it_was():
    class Broken(Regression):
        broken = True

        def forward(self, x, target):
            self.fc.weight.data.add_(0)
            self.scratch = x * 2
            if self.broken:
                raise KeyError("mine")
            return super().forward(x, target)

    model = Broken()
    optimizer = torch.optim.Adam(model.parameters())
    training = train(model, optimizer)
    assert_untouched(model, optimizer, lambda: training(*batch()), KeyError, "mine")
    assert not hasattr(model, "scratch")
    assert not training.isCompiled()
    assert not poptorch.isRunningOnIpu()
    Regression().forward(*batch())
    Broken.broken = False
    training(*batch())


@pytest.mark.parametrize("counts", [{}, {"D": 2}, {"G": 2}, {"R": 2}, {"D": 2, "G": 2}], ids=str)
def test_guard_failure_leaves_the_state_of_the_last_finished_update(counts):
    class Normed(Gate):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1)
            self.fc.bias.requires_grad_(False)  # its gradient is zero but for rounding, which Adam would blow up

        def forward(self, x, target):
            y = self.norm(self.fc(x))
            if x.sum() > 0:
                y = y * 2
            return y, F.mse_loss(y, target)

    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.Adam(model.parameters())
    training = train(model, optimizer, **counts)
    updates = counts.get("D", 1)
    rows = 2 * updates * counts.get("G", 1) * counts.get("R", 1)
    good = torch.rand(rows, 3), torch.rand(rows, 1)
    training(*good)

    reference, kept = copy.deepcopy(model), snapshot(model, optimizer)
    bad = good[0].clone()
    bad[-1] = -10.0  # only the last micro-batch goes the other way
    with pytest.raises(poptorch.Error, match=r"x.sum\(\) > 0"):
        training(bad, good[1])
    if updates == 1:
        assert_same(kept, snapshot(model, optimizer))
        return
    expected = copy.deepcopy(reference)
    expected_optimizer = torch.optim.Adam(expected.parameters())
    expected_optimizer.load_state_dict(kept[1])
    per_update = rows // updates
    expected_optimizer.zero_grad()
    for part in range(0, per_update, 2):
        (expected(good[0][part : part + 2], good[1][part : part + 2])[1] / (per_update // 2)).backward()
    expected_optimizer.step()
    torch.testing.assert_close(snapshot(model, optimizer), snapshot(expected, expected_optimizer))


def test_after_a_guard_failure_training_goes_on():
    torch.manual_seed(0)
    model, reference = Gate(), Gate()
    reference.load_state_dict(model.state_dict())
    training, clean = train(model, G=2), train(reference, G=2)
    good = torch.rand(4, 3), torch.rand(4, 1)
    training(*good)
    clean(*good)
    bad = good[0].clone()
    bad[2:] = -1
    with pytest.raises(poptorch.Error):
        training(bad, good[1])
    training(*good)
    clean(*good)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
