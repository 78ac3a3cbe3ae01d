"""Which numbers of an optimiser may change after compiling, and how they are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from optim.banks import Given
from optim.kinds import HYPERS, OURS, ROW, Classifier, o, small, wrap


def test_what_was_given_is_variable():
    """36-40."""
    parameters = [nn.Parameter(torch.zeros(1))]
    plain = o.SGD(parameters, lr=0.01).variable_attrs
    assert plain.isConstant("momentum")
    assert not plain.isConstant("lr")
    assert plain.isConstant("loss_scaling")
    plain.markAsVariable("loss_scaling")
    assert not plain.isConstant("loss_scaling")
    assert "momentum" in plain._allowed_attributes  # read by programs
    given = o.SGD(parameters, lr=0.01, momentum=0.0, loss_scaling=2.0).variable_attrs
    assert not given.isConstant("momentum")
    assert not given.isConstant("loss_scaling")
    given.markAsConstant("loss_scaling")
    assert given.isConstant("loss_scaling")
    assert given.isConstant("never heard of")
    with pytest.raises(AssertionError, match="Unknown attribute 'foo'"):
        given.markAsConstant("foo")


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("is_given", [True, False])
def test_loss_scaling_may_change_if_it_is_variable(kind, is_given):
    # statements 41, 42
    model = Given()
    optimizer = kind(model.parameters(), lr=0.1, **({"loss_scaling": 1.0} if is_given else {}))
    if not is_given:
        optimizer.variable_attrs.markAsVariable("loss_scaling")
    training = wrap(model, optimizer)
    training(ROW)
    optimizer.loss_scaling = 2.0
    training.setOptimizer(optimizer)
    training(ROW)


@pytest.mark.parametrize("kind", HYPERS)
def test_twins_describe_the_same_optimiser(kind, caplog):
    """43-46, 49: usual numbers of torch, only lr, and numbers marked as constant are one and the same."""
    twin = kind.__bases__[1]
    assert twin.__module__.startswith("torch.optim")
    model = Given()
    training = wrap(model, twin(model.parameters(), lr=0.1, **HYPERS[kind]))
    training(ROW)
    marked = kind(model.parameters(), lr=0.1, **HYPERS[kind])
    for name in HYPERS[kind]:
        marked.variable_attrs.markAsConstant(name)
    with caplog.at_level("DEBUG", logger="poptorch::python"):
        for same in (twin(model.parameters(), lr=0.1), kind(model.parameters(), lr=0.1), marked):
            training.setOptimizer(same)
        assert "Updating" not in caplog.text
        training.setOptimizer(kind(model.parameters(), lr=0.2))
    assert "Updating group 0 optimizer with" in caplog.text


@pytest.mark.parametrize("kind", HYPERS)
@pytest.mark.parametrize("is_marked", [False, True])
def test_variable_numbers_can_all_change(kind, is_marked):
    """47, 48; nothing is compiled again."""

    def changed(value):
        return tuple(v / 2 for v in value) if isinstance(value, tuple) else value + 0.5

    model = Given()
    first = kind(model.parameters(), lr=0.1, **({} if is_marked else HYPERS[kind]))
    if is_marked:
        for name in HYPERS[kind]:
            first.variable_attrs.markAsVariable(name)
    training = wrap(model, first)
    training(ROW)
    program = training._executable
    training.setOptimizer(
        kind(model.parameters(), lr=0.6, **{name: changed(value) for name, value in HYPERS[kind].items()})
    )
    training(ROW)
    assert training._executable is program


def test_amsgrad_is_refused_for_poptorchs_adam():
    """50; torch's own classes have it."""
    model = Given()
    with pytest.raises(ValueError, match="Only non-amsgrad Adam/AdamW optimizers are supported"):
        wrap(model, o.Adam(model.parameters(), amsgrad=True))


@pytest.mark.parametrize(
    ("kind", "before", "after", "text"),
    [
        (o.Adam, {}, {"lr": 0.5}, "non constant value: lr of parameter group 0"),
        (o.Adam, {"lr": 0.1}, {"lr": 0.1, "eps": 1e-3}, "Can not replace a constant value with a non constant value"),
        (o.SGD, {"lr": 0.1}, {"lr": 0.1, "max_grad_norm": 1.0}, "max_grad_norm"),
        (o.SGD, {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, "rule"),
        (o.SGD, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True}, "kind"),
        (o.SGD, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "velocity_accum_type": torch.half}, "types"),
        (o.Adam, {"lr": 0.1, "accum_type": torch.half}, {"lr": 0.1}, "accum_type cannot change"),
        (o.RMSprop, {"lr": 0.1}, {"lr": 0.1, "centered": True}, "kind"),
        (o.LAMB, {"lr": 0.1}, {"lr": 0.1, "bias_correction": False}, "kind"),
    ],
)
def test_what_a_replacement_may_not_change(kind, before, after, text):
    # statements 90, 91, 92
    training, _ = small(kind, **before)
    training(ROW)
    with pytest.raises(poptorch.Error, match=text):
        training.setOptimizer(kind(training.model.parameters(), **after))


@pytest.mark.parametrize(("kind", "other"), [(o.SGD, o.Adam), (o.Adam, o.AdamW), (o.AdamW, torch.optim.RMSprop)])
def test_the_class_may_not_change(kind, other):
    # statement 90
    training, _ = small(kind, lr=0.1)
    training(ROW)
    with pytest.raises(poptorch.Error, match="kind of optimiser cannot change"):
        training.setOptimizer(other(training.model.parameters(), lr=0.1))


def test_a_constant_that_changed():
    """92: without lr in the constructor, lr is a constant."""
    training, optimizer = small(o.Adam)
    training(ROW)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(poptorch.Error, match="Values are constant but do not match"):
        training.setOptimizer(optimizer)


@pytest.mark.parametrize(
    ("settings", "change", "error", "text"),
    [
        ({"lr": 0.1}, {"lr": torch.tensor(0.1)}, AssertionError, "lr of parameter group 0 is tensor"),
        ({"lr": 0.1}, {"betas": [0.9, 0.99]}, AssertionError, "betas of parameter group 0"),
        ({"lr": 0.1}, {"lr": -1.0}, poptorch.Error, "cannot be negative"),
        ({"lr": 0.1, "max_grad_norm": float("nan")}, {}, poptorch.Error, "max_grad_norm is nan"),
        (
            {"lr": 0.1, "loss_scaling": 0.0},
            {},
            poptorch.Error,
            "loss_scaling of the optimiser is 0, and must be positive",
        ),
    ],
)
def test_values_that_are_refused(settings, change, error, text):
    model = Given()
    optimizer = o.Adam(model.parameters(), **settings)
    optimizer.param_groups[0].update(change)
    with pytest.raises(error, match=text):
        wrap(model, optimizer)


def test_groups_of_rmsprop_must_agree_on_centered():
    model = Classifier()
    groups = [{"params": model.first.parameters()}, {"params": model.second.parameters(), "centered": True}]
    with pytest.raises(AssertionError, match="centered"):
        wrap(model, o.RMSprop(groups, lr=0.1))


def test_a_constant_learning_rate_of_zero_is_refused():
    model = Given()
    optimizer = o.SGD(model.parameters(), lr=0.0)
    optimizer.variable_attrs.markAsConstant("lr")
    with pytest.raises(poptorch.Error, match="constant zero"):
        wrap(model, optimizer)
