"""Types of accumulators, and how gradients are accumulated."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch
from optim.banks import Given, options
from optim.kinds import ROW, o, small, wrap


def test_accumulation_type_is_checked():
    """22, and the check when it is changed afterwards."""
    parameters = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(AssertionError, match=r"accum_type is torch.bfloat16"):
        o.Adam(parameters, accum_type=torch.bfloat16)
    model = Given()
    optimizer = o.Adam(model.parameters())
    optimizer.accum_type = torch.bfloat16
    with pytest.raises(ValueError, match="accum_type"):
        wrap(model, optimizer)


def test_combined_sgd_and_its_copy():
    # statements 23, 24
    training, optimizer = small(
        o.SGD, lr=0.1, momentum=0.5, use_combined_accum=True, velocity_scaling=128.1, loss_scaling=0.05
    )
    training(ROW)
    training.setOptimizer(copy.copy(optimizer))
    training(ROW)


def test_velocity_scaling_belongs_to_the_combined_variant(caplog):
    # statements 25, 26
    separate = o.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, velocity_scaling=2.0)
    assert "velocity_scaling" not in separate.param_groups[0]
    assert "velocity_scaling=2.0 is ignored" in caplog.text
    groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    combined = o.SGD(groups, lr=0.1, use_combined_accum=True, velocity_scaling=2.0)
    assert [group["velocity_scaling"] for group in combined.param_groups] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        ({"accum_type": torch.float16}, "Running"),
        ({"accum_type": torch.float32}, "Post"),
        ({}, "Post"),
        ({"accum_type": torch.float16, "use_combined_accum": True}, "Post"),
    ],
)
def test_float16_accumulators_take_a_running_mean(settings, strategy):
    """28-30, 33: also if the options are frozen, and the user's own options stay as they are."""
    made = options(accumulation=2)
    made._freeze()
    model = Given()
    training = wrap(model, o.SGD(model.parameters(), lr=0.1, **settings), made)
    training(torch.ones(2, 3))
    assert training.options.Training.meanAccumulationAndReplicationReductionStrategy.name == strategy
    assert made.Training.meanAccumulationAndReplicationReductionStrategy.name == "Post"


def test_strategy_of_inference_and_a_chosen_one():
    # statements 31, 32
    inference = poptorch.inferenceModel(Given(), options())
    assert inference.options.Training.meanAccumulationAndReplicationReductionStrategy.name == "Post"
    made = options()
    made.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.Running)
    model = Given()
    training = wrap(model, o.SGD(model.parameters(), lr=0.1), made)
    assert training.options.Training.meanAccumulationAndReplicationReductionStrategy.name == "Running"


def test_the_deprecated_strategy_is_refused_when_compiling():
    made = options(accumulation=2)
    made.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.PostAndLoss)
    model = Given()
    with pytest.raises(poptorch.Error, match="out of range"):
        wrap(model, o.SGD(model.parameters(), lr=0.1), made)(torch.ones(2, 3))


def test_accumulation_type_after_compiling():
    # statements 34, 35
    training, optimizer = small(o.Adam, lr=0.1)
    training(ROW)
    optimizer.accum_type = torch.half
    with pytest.raises(ValueError, match="is already compiled"):
        training.setOptimizer(optimizer)
    training, optimizer = small(o.Adam, lr=0.1, accum_type=torch.half)
    training(ROW)
    optimizer.param_groups[0]["lr"] = 0.2
    training.setOptimizer(optimizer)
    training(ROW)
