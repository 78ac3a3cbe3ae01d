"""A program that fails while it changes weights is not called again before somebody has repaired them."""

from __future__ import annotations

import pytest
import torch

import poptorch
from models import Regression
from poptorch.engines import native


def test_a_failure_in_the_middle_of_an_update_is_told_and_remembered(monkeypatch):
    model = Regression()
    options = poptorch.Options().engine("inductor")
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.ones(4, 3), torch.ones(4, 2)
    training(*batch)

    def fail(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(native, "to_handles", fail)
        with pytest.raises(poptorch.Error, match=r"middle of a weight update(?s:.*)reason: out of memory"):
            training(*batch)
    with pytest.raises(poptorch.Error, match=r"middle of a weight update(?s:.*)load_state_dict"):
        training(*batch)
    training.load_state_dict(model.state_dict())
    training(*batch)


def test_an_op_that_fails_on_the_eager_engine_changes_nothing(monkeypatch):
    class Failing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(3, 3)

        def forward(self, x):
            return poptorch.identity_loss(torch.ops.poptorch_tests.maybe_fail(self.fc(x)), reduction="sum")

    model = Failing()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    training(torch.ones(1, 3))
    before = model.fc.weight.detach().clone()
    FAILS.append(True)
    with pytest.raises(RuntimeError, match="told to fail"):
        training(torch.ones(1, 3))
    FAILS.clear()
    assert torch.equal(model.fc.weight, before)
    training(torch.ones(1, 3))
    assert not torch.equal(model.fc.weight, before)


FAILS: list[bool] = []


@torch.library.custom_op("poptorch_tests::maybe_fail", mutates_args=())
def maybe_fail(x: torch.Tensor) -> torch.Tensor:
    if FAILS:
        raise RuntimeError("told to fail")
    return x.clone()


@maybe_fail.register_fake
def _(x):
    return torch.empty_like(x)


maybe_fail.register_autograd(lambda ctx, gradient: gradient)
