"""What people do with optimisers around training: schedule, freeze, add groups, convert, load; and get wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import poptorch
from models import Regression
from optim.banks import Given, options

o = poptorch.optim
ROW = torch.ones(1, 3)
BATCH = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 2)


def wrap(model, optimizer):
    return poptorch.trainingModel(model, options(), optimizer)


# ---- schedules


SCHEDULES = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=8),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=1
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [torch.optim.SGD, o.Adam, torch.optim.NAdam])
def test_schedules_do_what_they_do_in_torch(schedule, kind):
    """OneCycleLR also changes momentum, or the first of the betas."""
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {"betas": (0.9, 0.999)}
    model = Regression()
    twin = copy.deepcopy(model)
    ours, theirs = kind(model.parameters(), lr=0.1, **settings), kind(twin.parameters(), lr=0.1, **settings)
    scheduler, reference = SCHEDULES[schedule](ours), SCHEDULES[schedule](theirs)
    training = wrap(model, ours)
    for _ in range(6):
        loss = training(*BATCH)[1]
        theirs.zero_grad()
        expected = twin(*BATCH)[1]
        expected.backward()
        theirs.step()
        on_plateau = schedule == "ReduceLROnPlateau"
        scheduler.step(*[loss] * on_plateau)
        reference.step(*[expected.detach()] * on_plateau)
        training.setOptimizer(ours)
    assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"])
    assert ours.param_groups[0]["lr"] != 0.1
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()), rtol=1e-4, atol=1e-5)


def test_a_schedule_of_a_constant_says_how_to_make_it_variable():
    model = Given()
    optimizer = o.Adam(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=8)
    training = wrap(model, optimizer)
    training(ROW)
    scheduler.step()
    with pytest.raises(poptorch.Error, match="beta1 of parameter group 0 was compiled as") as caught:
        training.setOptimizer(optimizer)
    assert "give the attribute to the constructor" in str(caught.value)


# ---- groups and parameters that change


@pytest.mark.parametrize("freezes", [True, False])
def test_freezing_or_thawing_a_compiled_parameter_is_refused(freezes):
    model = Regression()
    model.fc.weight.requires_grad_(freezes)
    training = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    training(*BATCH)
    before = copy.deepcopy(model.state_dict())
    model.fc.weight.requires_grad_(not freezes)
    with pytest.raises(poptorch.Error, match=r"parameter fc.weight requires (a|no) gradient, but did") as caught:
        training(*BATCH)
    assert "call setOptimizer" in str(caught.value)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model.fc.weight.requires_grad_(freezes)
    training(*BATCH)
    assert not torch.equal(model.fc.bias, before["fc.bias"])
    training.destroy()
    model.fc.weight.requires_grad_(not freezes)
    before = copy.deepcopy(model.state_dict())
    wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))(*BATCH)
    assert torch.equal(model.fc.weight, before["fc.weight"]) == freezes


@pytest.mark.parametrize("kind", [torch.optim.SGD, o.Adam])
def test_a_group_that_is_added_before_compiling_is_trained(kind):
    model = Regression()
    optimizer = kind([model.fc.weight], lr=0.1)
    training = wrap(model, optimizer)
    optimizer.add_param_group({"params": [model.fc.bias], "lr": 0.0})
    training.setOptimizer(optimizer)
    before = copy.deepcopy(model.state_dict())
    training(*BATCH)
    assert torch.equal(model.fc.bias, before["fc.bias"])
    optimizer.param_groups[1]["lr"] = 0.1
    training.setOptimizer(optimizer)
    training(*BATCH)
    assert not torch.equal(model.fc.bias, before["fc.bias"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, o.RMSprop, torch.optim.NAdam])
def test_an_empty_group_is_in_nobodys_way(kind):
    model = Given()
    before = model.w.detach().clone()
    optimizer = kind([{"params": []}, {"params": model.parameters()}], lr=0.1)
    training = wrap(model, optimizer)
    training(ROW)
    optimizer.param_groups[0]["lr"] = 0.5
    training.setOptimizer(optimizer)
    assert not torch.equal(model.w, before)


@pytest.mark.parametrize("kind", [torch.optim.SGD, o.Adam, torch.optim.NAdam])
def test_parameters_of_another_model_are_named(kind):
    model = Given()
    with pytest.raises(poptorch.Error, match=r"shape \[2, 5\] that is not part of the model"):
        wrap(model, kind([*model.parameters(), nn.Parameter(torch.ones(2, 5))], lr=0.1))(ROW)


def test_an_optimiser_without_parameters_trains_nothing_with_a_warning(caplog):
    wrap(Given(), o.SGD([{"params": []}], lr=0.1))(ROW)
    (record,) = [r for r in caplog.records if "nothing is trained" in r.message]
    assert "0 parameters that require a gradient in 1 group(s)" in record.message


def test_a_list_of_no_optimisers_is_refused():
    with pytest.raises(poptorch.Error, match="list of optimisers is empty"):
        wrap(Given(), [])


@pytest.mark.parametrize(
    ("kind", "state"), [(torch.optim.Adam, torch.float16), (o.Adam, torch.float32), (torch.optim.NAdam, torch.float16)]
)
def test_an_optimiser_may_be_made_before_the_model_becomes_half(kind, state):
    model = Regression()
    optimizer = kind(model.parameters(), lr=0.1)
    model.half()
    wrap(model, optimizer)(*(tensor.half() for tensor in BATCH))
    assert model.fc.weight.dtype == torch.float16
    assert optimizer.state[model.fc.weight]["exp_avg"].dtype == state


# ---- numbers and state that make no sense


@pytest.mark.parametrize("kind", [torch.optim.Adam, o.LAMB])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lr": float("nan")}, "lr of parameter group 0 is nan, and must be finite"),
        ({"lr": float("inf")}, "lr of parameter group 0 is inf, and must be finite"),
        ({"betas": 0.9}, "betas of parameter group 0 is 0.9, not a tuple"),
        ({"betas": (0.9, 1.0)}, r"betas of parameter group 0 is \(0.9, 1.0\)"),
        ({"betas": (0.9, "x")}, "betas of parameter group 0 is 'x', not a number"),
    ],
)
def test_wrong_numbers_are_quoted(kind, change, text):
    model = Given()
    optimizer = kind(model.parameters())
    optimizer.param_groups[0].update(change)
    with pytest.raises(poptorch.Error, match=text):
        wrap(model, optimizer)


class Own(torch.optim.Optimizer):
    """A step of the user's own."""

    def __init__(self, params, lr=0.1, **others):
        super().__init__(params, {"lr": lr, "beta": 0.9, **others})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * group["beta"])


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        (torch.optim.NAdam, {"lr": -0.1}, "lr of parameter group 0 is -0.1, and cannot be negative"),
        (torch.optim.NAdam, {"lr": float("inf")}, "lr of parameter group 0 is inf, and must be finite"),
        (torch.optim.NAdam, {"lr": "0.1"}, "lr of parameter group 0 is '0.1', not a number"),
        (torch.optim.NAdam, {"betas": (0.9, float("nan"))}, "betas.1 of parameter group 0 is nan"),
        (torch.optim.NAdam, {"betas": (0.9, None)}, r"betas of .* is \(0.9, None\), not a tuple of 2 numbers"),
        (torch.optim.NAdam, {"betas": (0.9, 2.0)}, "parameter group 0 of NAdam cannot be: Invalid beta"),
        (torch.optim.NAdam, {"momentum_decay": -1.0}, "parameter group 0 of NAdam cannot be: Invalid momentum_decay"),
        (torch.optim.Rprop, {"step_sizes": (0.1, float("-inf"))}, "step_sizes.1 of parameter group 0 is -inf"),
        (torch.optim.Adafactor, {"eps": 1e-3}, "eps of parameter group 0 is 0.001, not a tuple of 2 numbers"),
        (torch.optim.Adafactor, {"eps": (None, None)}, r"eps of .* is \(None, None\), not a tuple of 2 numbers"),
        (torch.optim.Adafactor, {"beta2_decay": 0.5}, "parameter group 0 of Adafactor cannot be: beta2_decay"),
        (torch.optim.SGD, {"nesterov": True}, "parameter group 0 of SGD cannot be: Nesterov momentum requires"),
        (Own, {"lr": -0.1}, "lr of parameter group 0 is -0.1, and cannot be negative"),
        (Own, {"lr": "0.1"}, "lr of parameter group 0 is '0.1', not a number"),
        (Own, {"beta": float("nan")}, "beta of parameter group 0 is nan, and must be finite"),
    ],
)
def test_numbers_have_the_limits_of_the_constructor(kind, change, text, is_compiled):
    """Also if they come into a group later, and whether a rule of ours or the step() of the class is compiled."""
    model = Given()
    optimizer = kind(model.parameters(), lr=0.1)
    training = wrap(model, optimizer) if is_compiled else None
    if training is not None:
        training(ROW)
    optimizer.param_groups[0].update(change)
    with pytest.raises(poptorch.Error, match=text):
        wrap(model, optimizer) if training is None else training.setOptimizer(optimizer)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (torch.optim.Rprop, {"step_sizes": (1e-6, float("inf"))}),
        (torch.optim.ASGD, {"t0": float("inf")}),
        (torch.optim.NAdam, {"lr": torch.tensor(0.1)}),
        (Own, {"limit": float("inf"), "beta": -0.5, "eps": None}),
        (Own, {"lr": torch.tensor(0.1)}),
    ],
)
def test_numbers_that_mean_something_are_taken(kind, change):
    model = Given()
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.param_groups[0].update(change)
    before = model.w.detach().clone()
    wrap(model, optimizer)(ROW)
    assert torch.isfinite(model.w).all()
    assert not torch.equal(model.w, before)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"weight_decay": float("nan")}])
def test_lamb_checks_its_numbers_as_torch_does(wrong):
    with pytest.raises(ValueError, match="Invalid"):
        o.LAMB(Given().parameters(), **wrong)


def test_a_schedule_cannot_lead_out_of_the_limits():
    model = Given()
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - 2 * epoch)
    training = wrap(model, optimizer)
    training(ROW)
    scheduler.step()
    with pytest.raises(poptorch.Error, match=r"lr of parameter group 0 is -0\.1, and cannot be negative"):
        training.setOptimizer(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Muon])
def test_state_of_another_type_than_the_parameter(kind):
    """Torch's own step() cannot do it either; the way out that the error names works."""
    model = nn.Linear(3, 2, bias=False)
    optimizer = kind(model.parameters(), lr=0.1)
    model.weight.grad = torch.ones(2, 3)
    optimizer.step()
    model.half()
    with pytest.raises(poptorch.Error, match=r"torch.float32 and shape \[2, 3\] for a parameter of torch.float16"):
        wrap(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    wrap(model, optimizer)


def test_captured_state_of_another_model():
    model = Given()
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    optimizer.state[model.w] = {**dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.zeros(7))}
    optimizer.state[model.w].update(step=torch.tensor(1.0), mu_product=torch.tensor(1.0))
    with pytest.raises(
        poptorch.Error, match=r"exp_avg of torch.float32 and shape \[7\] for a parameter of .* shape \[3\]"
    ):
        wrap(model, optimizer)


@pytest.mark.parametrize("kind", [torch.optim.SGD, o.SGD, o.Adam, o.RMSprop, o.LAMB])
def test_the_state_of_another_kind_of_optimiser(kind):
    """Torch loads it, settings and all, so it is found when the optimiser is read."""
    model = Given()
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.load_state_dict(torch.optim.Rprop(model.parameters(), lr=0.1).state_dict())
    with pytest.raises(poptorch.Error, match=r"parameter group 0 has no \w+, which") as caught:
        wrap(model, optimizer)
    assert "another kind of optimiser was loaded" in str(caught.value)


@pytest.mark.parametrize("kind", [torch.optim.Adam, o.Adam])
def test_the_state_of_another_model(kind):
    model = Given()
    optimizer = kind(model.parameters(), lr=0.1)
    training = wrap(model, optimizer)
    training(ROW)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.zeros(7)
    saved.pop("ipu_state", None)
    optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"exp_avg of shape \[7\] for parameter w, which needs \[3\]"):
        training(ROW)


def test_ipu_state_of_another_model():
    model = Given()
    optimizer = o.Adam(model.parameters(), lr=0.1)
    wrap(model, optimizer)(ROW)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["ipu_state"]["Accl1___w"] = torch.zeros(7)
    with pytest.raises(RuntimeError, match=r"Accl1___w of shape \[7\], but \[3\] is needed"):
        optimizer.load_state_dict(saved)
