"""Groups of parameters, and what the log tells about them."""

from __future__ import annotations

import copy

import pytest
import torch

import poptorch
from optim.banks import options
from optim.kinds import Classifier, o, wrap


@pytest.mark.parametrize("kind", [torch.optim.SGD, o.SGD])
def test_groups_have_their_own_learning_rate(kind):
    """51-53."""

    def make(first, second):
        groups = [
            {"params": model.first.parameters(), "lr": first},
            {"params": model.second.parameters(), "lr": second},
        ]
        return kind(groups, lr=1.0)

    torch.manual_seed(0)
    model = Classifier()
    training = wrap(model, make(0.0, 0.0))
    batch = torch.randn(1, 10), torch.tensor([3])

    def changed(runs):
        before = copy.deepcopy(model.state_dict())
        for _ in range(runs):
            training(*batch)
        return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}

    assert changed(3) == set()
    training.setOptimizer(make(0.1, 0.0))
    assert changed(3) == {"first.weight", "first.bias"}
    training.setOptimizer(make(0.1, 0.1))
    assert len(changed(100)) == 4
    assert training(*batch)[0].argmax() == 3


def test_group_values_win_over_defaults():
    # statement 54
    model = Classifier()
    before = copy.deepcopy(model.state_dict())
    groups = [{"params": list(part.parameters()), "lr": 0.0} for part in (model.first, model.second)]
    training = wrap(model, torch.optim.AdamW(groups, lr=0.1))
    training(torch.randn(1, 10), torch.tensor([3]))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def log_of(caplog, action):
    caplog.clear()
    with caplog.at_level("DEBUG", logger="poptorch::python"):
        action()
    return [text for record in caplog.records if (text := record.getMessage()).startswith("Updating")]


def two_groups(**settings):
    model = Classifier()
    groups = [{"params": model.first.parameters()}, {"params": model.second.parameters()}]
    return model, o.SGD(groups, lr=0.1, **settings)


def test_velocity_scaling_in_the_log(caplog):
    # statements 27, 55, 56, 59
    model, optimizer = two_groups(loss_scaling=2.0, velocity_scaling=2.0, use_combined_accum=True)
    made: list[poptorch.PoplarExecutor] = []
    lines = log_of(caplog, lambda: made.append(wrap(model, optimizer)))
    (training,) = made
    assert "defaultVelocityScaling=2, lossScaling=2" in lines[0]
    assert ["velocityScaling=2 for" in line for line in lines[1:3]] == [True, True]
    assert "['second.weight', 'second.bias']" in lines[2]
    optimizer.param_groups[1]["velocity_scaling"] = 4.0
    lines = log_of(caplog, lambda: training.setOptimizer(optimizer))
    assert [line[:16] for line in lines] == ["Updating group 1"]
    assert "velocityScaling=4 for" in lines[0]
    optimizer.loss_scaling = 4.0
    lines = log_of(caplog, lambda: training.setOptimizer(optimizer))
    assert [line[:14] for line in lines] == ["Updating graph"]
    assert "defaultVelocityScaling=2, lossScaling=4" in lines[0]
    model, optimizer = two_groups(loss_scaling=2.0)
    lines = log_of(caplog, lambda: made.append(wrap(model, optimizer)))
    assert "SGD2" in lines[0]
    assert ["elocityScaling=2" in line for line in lines] == [True, True, True]
    optimizer.loss_scaling = 4.0
    optimizer.defaults["lr"] = 0.7
    lines = log_of(caplog, lambda: made[1].setOptimizer(optimizer))
    assert ["elocityScaling=4" in line for line in lines] == [True, True, True]
    assert "defaultLearningRate=0.7" in lines[0]
    assert "learningRate=0.1," in lines[1]
    optimizer.loss_scaling = 1.0
    lines = log_of(caplog, lambda: made[1].setOptimizer(optimizer))
    assert ["elocityScaling=1" in line for line in lines] == [True, True, True]


def test_attributes_that_nobody_reads_are_reported_once(caplog):
    # statements 57, 58, 60, 61, 63
    model, optimizer = two_groups()
    optimizer.param_groups[0]["step"] = 1  # there before the first use: never reported
    training = wrap(model, optimizer)
    optimizer.param_groups[0]["loss_scaling"] = 4.0
    optimizer.param_groups[1]["velocity_scaling"] = 4.0
    optimizer.lr = 0.5
    caplog.clear()
    training.setOptimizer(optimizer)
    training.setOptimizer(optimizer)
    assert sorted(record.getMessage() for record in caplog.records if record.levelname == "WARNING") == [
        "Ignoring unexpected group 0 attribute: loss_scaling",
        "Ignoring unexpected group 1 attribute: velocity_scaling",
        "Ignoring unexpected optimizer attribute: lr",
    ]


def test_a_known_group_key_is_still_new_as_an_attribute(caplog):
    """63: LR schedulers that are built before wrapping cause no report."""
    model, optimizer = two_groups()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    training = wrap(model, optimizer)
    caplog.clear()
    training.setOptimizer(optimizer)
    assert not caplog.records
    optimizer.initial_lr = 0.1
    training.setOptimizer(optimizer)
    assert [record.getMessage() for record in caplog.records] == ["Ignoring unexpected optimizer attribute: initial_lr"]


def test_reports_can_be_silenced(caplog):
    # statement 62
    model, optimizer = two_groups()
    training = wrap(model, optimizer, options().relaxOptimizerAttributesChecks())
    optimizer.param_groups[0]["initial_lr"] = optimizer.initial_lr = 0.1
    caplog.clear()
    training.setOptimizer(optimizer)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
