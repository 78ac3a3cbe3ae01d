"""The life of an executor: compile, run, detach, destroy; and how it looks like the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from model.executors import assert_same, batch, infer, sgd, snapshot, train
from models import Regression


def test_states_of_an_executor():
    training = train(Regression())
    assert (training.isCompiled(), training.isAttachedToDevice()) == (False, False)
    training(*batch())
    assert (training.isCompiled(), training.isAttachedToDevice()) == (True, True)
    training.detachFromDevice()
    assert (training.isCompiled(), training.isAttachedToDevice()) == (True, False)
    training.attachToDevice()
    assert (training.isCompiled(), training.isAttachedToDevice()) == (True, True)
    training.destroy()
    assert (training.isCompiled(), training.isAttachedToDevice()) == (False, False)


NEEDS_PROGRAM = ["copyWeightsToHost", "copyWeightsToDevice", "attachToDevice", "detachFromDevice"]


@pytest.mark.parametrize("wrap", [train, infer])
@pytest.mark.parametrize("method", NEEDS_PROGRAM)
def test_methods_that_need_a_program(method, wrap):
    executor = wrap(Regression())
    for _ in range(2):
        with pytest.raises(poptorch.Error, match="Model has not been compiled or has been destroyed"):
            getattr(executor, method)()
        executor(*batch())
        executor.destroy()


def test_detaching_twice():
    training = train(Regression())
    training(*batch())
    training.detachFromDevice()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        training.detachFromDevice()


def test_attaching_twice():
    training = train(Regression())
    training(*batch())
    with pytest.raises(poptorch.Error, match="already attached"):
        training.attachToDevice()


def test_calling_a_detached_model_attaches_it():
    training = train(Regression())
    training(*batch())
    training.detachFromDevice()
    training(*batch())
    assert training.isAttachedToDevice()


def test_destroying_twice_does_no_harm():
    training = train(Regression())
    training(*batch())
    training.destroy()
    training.destroy()


def test_destroyed_training_model_can_be_called_again():
    training = train(Regression())
    training(*batch(4))
    training.destroy()
    training(*batch(6))
    assert training.isCompiled()


def test_compile_does_not_run():
    model = Regression()
    optimizer = sgd(model, momentum=0.9)
    training = train(model, optimizer)
    before = snapshot(model)
    training.compile(*batch())
    assert training.isCompiled()
    assert_same(before, snapshot(model))


def test_compiling_twice_is_ignored_with_a_warning(caplog):
    training = train(Regression())
    training.compile(*batch())
    training.compile(*batch(6))
    assert "ignored" in caplog.text
    training(*batch())


def test_forward_runs_in_python_only_while_compiling():
    calls = []

    class Noisy(Regression):
        def forward(self, x, target):
            calls.append(poptorch.isRunningOnIpu())
            return super().forward(x, target)

    training = train(Noisy())
    training(*batch())
    count = len(calls)
    for _ in range(3):
        training(*batch())
    assert len(calls) == count
    assert all(calls)
    assert not poptorch.isRunningOnIpu()


def test_running_on_ipu_chooses_the_branch():
    class Either(nn.Module):
        def forward(self, x, y):
            return x + y if poptorch.isRunningOnIpu() else x * y

    x, y = torch.tensor([50.0]), torch.tensor([2.0])
    assert infer(Either())(x, y).item() == 52
    assert Either()(x, y).item() == 100


@pytest.mark.parametrize("wrap", [train, infer])
def test_attributes_reach_the_model(wrap):
    class Named(Regression):
        label = "mine"

        def double(self, x):
            return 2 * x

    executor = wrap(Named())
    assert executor.label == "mine"
    assert executor.double(3) == 6
    assert executor.fc is executor.model.fc
    assert list(executor.state_dict()) == ["fc.weight", "fc.bias"]
    assert [name for name, _ in executor.named_parameters()] == ["fc.weight", "fc.bias"]


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        infer(Regression()).no_such_thing


def test_writing_an_attribute_stays_on_the_executor():
    model = Regression()
    training = train(model)
    training.note = "hello"
    assert training.note == "hello"
    assert not hasattr(model, "note")


def test_repr_shows_the_module_tree_and_the_state():
    training = train(Regression())
    assert "(fc): Linear(in_features=3, out_features=2" in repr(training)
    assert "not compiled" in repr(training)
    training(*batch())
    assert "not compiled" not in repr(training)
    assert "emulated" in repr(training)


def test_names_that_programs_use_although_they_are_private():
    training = train(Regression())
    assert training._options is training.options
    assert training._user_model is training.model
    assert training._executable is None
    training(*batch())
    assert training._executable is not None


def test_options_of_an_executor_are_frozen():
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        train(Regression()).options.deviceIterations(2)
