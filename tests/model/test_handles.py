"""What wrapping adds to a module, and how it goes away again."""

from __future__ import annotations

import copy
import gc
import io

import torch
from torch import nn

import poptorch
from models import Regression


def wrapped(module: nn.Module) -> poptorch.PoplarExecutor:
    options = poptorch.Options().engine("eager")
    return poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))


def test_a_wrapped_module_can_unwrap_itself():
    module = Regression()
    training = wrapped(module)
    training(torch.ones(2, 3), torch.ones(2, 2))
    assert module.copyWeightsToHostIfNeeded() is False
    module.destroy()
    assert not training.isCompiled()
    assert not hasattr(module, "destroy")
    assert not hasattr(module, "copyWeightsToHostIfNeeded")
    wrapped(module)


def test_a_module_outlives_its_executor():
    module = Regression()
    training = wrapped(module)
    del training
    gc.collect()
    assert module.destroy() is False
    second = wrapped(module)
    module.destroy()
    assert not hasattr(module, "destroy")
    assert not second.isCompiled()


def test_copies_and_pickles_are_not_wrapped():
    module = Regression()
    training = wrapped(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert other.destroy is None
        wrapped(other).destroy()
        assert not hasattr(other, "destroy")
    assert b"poptorch" not in file.getvalue()
    assert callable(training.model.destroy)


def test_methods_of_the_user_stay():
    class Own(Regression):
        def destroy(self) -> str:
            return "mine"

    module = Own()
    training = wrapped(module)
    assert module.destroy() == "mine"
    training.destroy()
    assert module.destroy() == "mine"
