"""Options as models use them: shared, frozen, cloned, and honoured in what a call returns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from models import Regression, Scale
from poptorch import ConnectionType, OutputMode


def eager():
    return poptorch.Options().engine("eager")


CHANGES = [
    lambda options: options.randomSeed(42),
    lambda options: options.set(random_seed=42),
    lambda options: options.Training.gradientAccumulation(0),
    lambda options: options._Popart.set("groupNormStridedChannelGrouping", True),
]


@pytest.mark.parametrize("change", CHANGES)
def test_wrapping_freezes_the_callers_options_and_those_of_the_executor(change):
    options = eager()
    executor = poptorch.trainingModel(Regression(), options)
    for frozen in (options, executor.options):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            change(frozen)


def test_a_clone_of_frozen_options_serves_a_second_model():
    options = eager()
    poptorch.inferenceModel(Scale(), options)
    other = options.clone().connectionType(ConnectionType.OnDemand)
    assert poptorch.inferenceModel(Scale(3.0), other)(torch.ones(1, 1)).item() == 3
    assert options.connection_type is ConnectionType.Always


def test_an_assigned_replication_factor_is_honoured():
    options = eager()
    options.replication_factor = 4
    model = poptorch.inferenceModel(Scale(), options)
    assert model(torch.ones(4, 1)).shape == (4, 1)
    with pytest.raises(AssertionError, match="replicationFactor 4"):
        poptorch.inferenceModel(Scale(), options)(torch.ones(3, 1))


@pytest.mark.parametrize(
    ("mode", "period", "expected"),
    [
        (OutputMode.All, 5, lambda native: native),  # only one mode has a period
        (OutputMode.Default, 5, lambda native: native),
        (OutputMode.EveryN, 5, lambda native: native[[4, 9]]),
        (OutputMode.Final, 5, lambda native: native[9:]),
        (OutputMode.Sum, 5, lambda native: native.sum(0, keepdim=True)),
    ],
)
def test_output_modes_choose_among_ten_iterations(mode, period, expected):
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 20), torch.randn(10, 1, 5, 6)
    model = poptorch.inferenceModel(layer, eager().deviceIterations(10).outputMode(mode, period))
    assert torch.allclose(model(x), expected(layer(x)), atol=1e-5)


def test_options_of_another_kind_are_refused():
    with pytest.raises(poptorch.Error, match="dict"):
        poptorch.inferenceModel(Scale(), {"deviceIterations": 2})


def test_training_in_several_processes_needs_to_know_where_the_others_are(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    options = eager()
    options.Distributed.configureProcessId(1, 2)
    model = Regression()
    weights = model.fc.weight.clone()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match=r"(?s)process 1 of 2.*poprun or torchrun.*MASTER_ADDR"):
        training(torch.ones(2, 3), torch.ones(2, 2))
    torch.testing.assert_close(model.fc.weight, weights)


def test_inference_works_in_several_processes():
    options = eager()
    options.Distributed.configureProcessId(1, 2)
    assert poptorch.inferenceModel(Scale(3.0), options)(torch.ones(1, 1)).item() == 3
