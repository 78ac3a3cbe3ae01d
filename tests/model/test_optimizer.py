"""The optimiser of an executor, and another one in its place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from model.executors import assert_same, batch, infer, options, sgd, snapshot, train
from models import Regression, Scale


def test_learning_rate_changes_with_set_optimizer_and_not_before():
    model = Scale(1.0)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return poptorch.identity_loss(self.inner(x), "sum")

    wrapped = Loss()
    optimizer = sgd(wrapped, lr=1.0)
    training = train(wrapped, optimizer)
    x = torch.tensor([1.0])
    training(x)
    assert model.factor.item() == 0
    optimizer.param_groups[0]["lr"] = 10.0
    training(x)
    assert model.factor.item() == -1
    training.setOptimizer(optimizer)
    training(x)
    assert model.factor.item() == -11


def test_scheduler_and_set_optimizer_do_not_compile_again():
    calls = []

    class Noisy(Regression):
        def forward(self, x, target):
            calls.append(1)
            return super().forward(x, target)

    torch.manual_seed(0)
    model = Noisy()
    reference = Regression()
    reference.load_state_dict(model.state_dict())
    optimizer, reference_optimizer = sgd(model, momentum=0.9), sgd(reference, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, reference_optimizer)]
    training = train(model, optimizer)
    training.compile(*batch())
    count = len(calls)
    for seed in range(3):
        x, target = batch(seed=seed)
        training(x, target)
        reference_optimizer.zero_grad()
        reference(x, target)[1].backward()
        reference_optimizer.step()
        optimizer._opt_called = True  # the schedulers expect step() to have been called
        for scheduler in schedulers:
            scheduler.step()
        training.setOptimizer(optimizer)
    assert len(calls) == count
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_inference_has_no_optimiser():
    model = Regression()
    with pytest.raises(AttributeError, match="setOptimizer"):
        infer(model).setOptimizer(sgd(model))


def test_optimiser_that_cannot_be_compiled():
    model = Regression()
    with pytest.raises(AssertionError, match="LBFGS"):
        poptorch.trainingModel(model, options(), torch.optim.LBFGS(model.parameters()))
    train(model)


def test_set_optimizer_to_another_kind_is_refused_after_compiling():
    model = Regression()
    optimizer = sgd(model)
    training = train(model, optimizer)
    training(*batch())
    before = snapshot(model)
    with pytest.raises(poptorch.Error, match="kind of optimiser"):
        training.setOptimizer(torch.optim.Adam(model.parameters()))
    assert_same(before, snapshot(model))
    training(*batch())


def test_optimiser_of_another_model_is_refused():
    training = train(Regression(), sgd(Regression()))
    with pytest.raises(poptorch.Error, match="not part of the model"):
        training(*batch())


def test_the_first_gradient_is_not_dampened_even_if_weights_were_replaced_before_it():
    torch.manual_seed(0)
    model, reference = Regression(), Regression()
    reference.load_state_dict(model.state_dict())
    own, theirs = (sgd(each, momentum=0.9, dampening=0.3) for each in (model, reference))
    training = train(model, own)
    training.compile(*batch())
    for seed in range(3):
        for parameter in model.parameters():  # lets the program be bound to other tensors
            parameter.data = parameter.data.clone()
        x, target = batch(seed=seed)
        training(x, target)
        theirs.zero_grad()
        reference(x, target)[1].backward()
        theirs.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))
