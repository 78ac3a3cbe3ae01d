"""The executor seen from outside: what it tells about itself, and how far it can stand in for the model."""

from __future__ import annotations

import copy
import io
import json
from datetime import timedelta

import pytest
import torch
from torch import nn

import poptorch
from models import Regression, Scale


def options() -> poptorch.Options:
    return poptorch.Options().engine("eager")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_compilation_time_is_positive():
    model = poptorch.inferenceModel(Scale(), options())
    model.compile(torch.ones(2))
    assert model.compilationTime() > timedelta(0)


def test_compilation_time_of_a_model_that_is_not_compiled():
    model = poptorch.inferenceModel(Scale(), options())
    with pytest.raises(poptorch.Error, match="Model has not been compiled"):
        model.compilationTime()
    model(torch.ones(2))
    model.destroy()
    with pytest.raises(poptorch.Error, match="Model has not been compiled"):
        model.compilationTime()


def test_compilation_time_without_a_progress_bar():
    model = poptorch.inferenceModel(Scale(), options().showCompilationProgressBar(False))
    model(torch.ones(2))
    with pytest.raises(poptorch.Error, match="progress bar"):
        model.compilationTime()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_compiled_graph_as_json(accumulation):
    opts = options()
    opts.Training.gradientAccumulation(accumulation)
    module = Regression()
    training = poptorch.trainingModel(module, opts, sgd(module))
    with pytest.raises(poptorch.Error, match="Model has not been compiled"):
        training._debugGetPopartIR()
    training(torch.ones(2, 3), torch.ones(2, 2))
    nodes = json.loads(training._debugGetPopartIR())["maingraph"]
    assert all(node["name"] and node["type"] for node in nodes)
    assert any("addmm" in node["type"] and "fc.bias" in node["inputs"] for node in nodes)


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
def test_executor_that_is_not_compiled_can_be_saved(wrap):
    module = Regression()
    file = io.BytesIO()
    torch.save(wrap(module, options()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    arguments = torch.ones(2, 3), torch.ones(2, 2)
    torch.testing.assert_close(loaded(*arguments)[0], module(*arguments)[0].detach())


class Announce:
    """A forward pre-hook with a text, like the one that begins a block."""

    def __call__(self, module, args):
        return None

    def __repr__(self):
        return "BeginBlock(user_id=None, ipu_id=1)"


def test_repr_shows_hooks_in_front_of_their_layer():
    module = nn.Sequential()
    module.add_module("l1", nn.Linear(2, 2))
    module.l1.register_forward_pre_hook(Announce())
    assert "(l1): BeginBlock(user_id=None, ipu_id=1) Linear(" in repr(poptorch.inferenceModel(module))


def test_executor_can_be_subclassed():
    class Counting(poptorch.PoplarExecutor):
        calls = 0

        def __call__(self, *args, **kwargs):
            self.calls += 1
            return super().__call__(*args, **kwargs)

    own = poptorch.inferenceModel(Scale(), options())
    counting = Counting(own.model, own.options, training=False)
    assert counting(torch.ones(1)).item() == 2
    assert counting.calls == 1


def test_executor_is_constructed_by_the_keywords_that_programs_use():
    model = Regression()
    outer = nn.Sequential(model)
    training = poptorch.PoplarExecutor(
        model=model,
        options=options(),
        training=True,
        poptorch_version="3.3",
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        user_model=outer,
    )
    before = model.fc.weight.clone()
    training(torch.randn(2, 3), torch.randn(2, 2))
    assert not torch.equal(before, model.fc.weight)
    assert training.model is outer
    assert training.options.output_mode is poptorch.OutputMode.Final


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
def test_attributes_and_methods_reach_the_users_model(wrap):
    class Mine(Regression):
        attr = 5

        def getAttr(self):
            return self.attr

    executor = wrap(Mine(), options())
    assert (executor.attr, executor.getAttr()) == (5, 5)
    executor.eval()
    assert not executor.training
    assert executor.fc is executor.model.fc


def test_wrapped_model_keeps_class_identity_and_copies():
    module = Regression()
    parameters = list(module.parameters())
    training = poptorch.trainingModel(module, options(), sgd(module))
    training(torch.ones(2, 3), torch.ones(2, 2))
    assert type(module) is Regression
    assert training.model is module
    assert all(now is before for now, before in zip(module.parameters(), parameters, strict=True))
    for copied in (copy.copy(module), copy.deepcopy(module)):
        assert type(copied) is Regression
        assert torch.equal(copied.fc.weight, module.fc.weight)
