"""Update rules against torch.optim: the same parameters and the same state after the same steps."""

from __future__ import annotations

import copy

import pytest
import torch

import poptorch
from models import Regression

SGD = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"weight_decay": 0.1},
    {"maximize": True, "momentum": 0.5},
]
ADAM = [
    {},
    {"betas": (0.5, 0.9), "eps": 1e-3},
    {"weight_decay": 0.1},
    {"amsgrad": True},
    {"amsgrad": True, "weight_decay": 0.1, "maximize": True},
]
RMSPROP = [
    {},
    {"alpha": 0.5, "eps": 1e-3},
    {"momentum": 0.9},
    {"centered": True},
    {"centered": True, "momentum": 0.9, "weight_decay": 0.1, "maximize": True},
]
CASES = [
    *[(torch.optim.SGD, settings) for settings in SGD],
    *[(torch.optim.Adam, settings) for settings in ADAM],
    *[(torch.optim.AdamW, settings) for settings in ADAM],
    *[(torch.optim.RMSprop, settings) for settings in RMSPROP],
]


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


def pair(make):
    """A model that poptorch trains, and a twin that plain PyTorch trains, each with an optimiser of its own."""
    torch.manual_seed(0)
    model = Regression()
    reference = copy.deepcopy(model)
    return model, make(model), reference, make(reference)


def train(model, optimizer) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, poptorch.Options().engine("eager"), optimizer)


def step(reference, optimizer, seed: int) -> None:
    optimizer.zero_grad()
    reference(*batch(seed))[1].backward()
    optimizer.step()


def assert_equal_state(model, optimizer, reference, reference_optimizer) -> None:
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.state_dict(), reference_optimizer.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "settings"), CASES, ids=lambda value: getattr(value, "__name__", None) or ",".join(value) or "plain"
)
def test_rule_matches_torch(kind, settings):
    model, optimizer, reference, reference_optimizer = pair(lambda m: kind(m.parameters(), lr=0.05, **settings))
    training = train(model, optimizer)
    for seed in range(10):
        training(*batch(seed))
        step(reference, reference_optimizer, seed)
    assert_equal_state(model, optimizer, reference, reference_optimizer)


def test_parameter_groups_have_their_own_numbers_and_rules():
    def make(model):
        groups = [{"params": [model.fc.weight], "lr": 0.2, "momentum": 0.9}, {"params": [model.fc.bias]}]
        return torch.optim.SGD(groups, lr=0.01, weight_decay=0.1)

    model, optimizer, reference, reference_optimizer = pair(make)
    training = train(model, optimizer)
    for seed in range(4):
        training(*batch(seed))
        step(reference, reference_optimizer, seed)
    assert_equal_state(model, optimizer, reference, reference_optimizer)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (torch.optim.SGD, "lr", 0.5),
        (torch.optim.SGD, "momentum", 0.3),
        (torch.optim.SGD, "weight_decay", 0.3),
        (torch.optim.Adam, "betas", (0.3, 0.7)),
        (torch.optim.Adam, "eps", 0.1),
        (torch.optim.RMSprop, "alpha", 0.3),
    ],
)
def test_numbers_change_without_compiling_again(kind, name, value):
    settings = {"momentum": 0.9, "weight_decay": 0.1} if kind is torch.optim.SGD else {}
    model, optimizer, reference, reference_optimizer = pair(lambda m: kind(m.parameters(), lr=0.05, **settings))
    training = train(model, optimizer)
    training(*batch(0))
    step(reference, reference_optimizer, 0)
    program = training._executable
    optimizer.param_groups[0][name] = reference_optimizer.param_groups[0][name] = value
    training.setOptimizer(optimizer)
    for seed in (1, 2):
        training(*batch(seed))
        step(reference, reference_optimizer, seed)
    assert training._executable is program
    assert_equal_state(model, optimizer, reference, reference_optimizer)


def test_learning_rate_may_be_a_tensor():
    model, optimizer, reference, reference_optimizer = pair(
        lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.05))
    )
    train(model, optimizer)(*batch(0))
    step(reference, reference_optimizer, 0)
    assert_equal_state(model, optimizer, reference, reference_optimizer)


def test_a_number_that_is_none_names_the_group():
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["weight_decay"] = "much"
    with pytest.raises(AssertionError, match="weight_decay of parameter group 0"):
        train(model, optimizer)


def test_subclass_is_compiled_as_its_parent_with_a_warning(caplog):
    class Mine(torch.optim.SGD):
        pass

    model = Regression()
    train(model, Mine(model.parameters(), lr=0.1))(*batch(0))
    assert "Mine" in caplog.text
    assert "SGD" in caplog.text


def test_unsupported_optimiser_lists_what_is_supported():
    model = Regression()
    with pytest.raises(AssertionError, match=r"LBFGS cannot be compiled") as caught:
        train(model, torch.optim.LBFGS(model.parameters()))
    assert "closure" in str(caught.value)
    assert "torch.optim" in str(caught.value)


def test_state_belongs_to_the_optimiser_the_user_holds():
    model = Regression()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    training = train(model, optimizer)
    training(*batch(0))
    average = optimizer.state[model.fc.weight]["exp_avg"]
    before = average.clone()
    training(*batch(1))
    assert optimizer.state[model.fc.weight]["exp_avg"] is average
    assert not torch.equal(average, before)
    assert optimizer.state[model.fc.weight]["step"].item() == 2


def test_another_optimiser_object_goes_on_with_the_state():
    model, optimizer, reference, reference_optimizer = pair(
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)
    )
    training = train(model, optimizer)
    training(*batch(0))
    step(reference, reference_optimizer, 0)
    other = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    training.setOptimizer(other)
    reference_optimizer.param_groups[0]["lr"] = 0.2
    training(*batch(1))
    step(reference, reference_optimizer, 1)
    assert_equal_state(model, other, reference, reference_optimizer)


HALF = [
    torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adafactor,
    poptorch.optim.Adam, poptorch.optim.AdamW, poptorch.optim.RMSprop, poptorch.optim.LAMB,
]  # fmt: skip


@pytest.mark.parametrize("kind", HALF, ids=lambda kind: f"{kind.__module__.partition('.')[0]}-{kind.__name__}")
def test_half_parameters_without_a_gradient_stay_finite(kind):
    """`eps` is 1e-8, which is zero in float16; zero by zero would end the training."""
    torch.manual_seed(0)
    model = Regression().half()
    before = copy.deepcopy(model.state_dict())
    training = train(model, kind(model.parameters(), lr=1.0 if kind is torch.optim.Adadelta else 0.01))
    x, target = (tensor.half() for tensor in batch(0))
    x[:, 0] = 0  # so there is a gradient of zero for a part of the weights
    for _ in range(3):
        training(x, target)
    after = model.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert not torch.equal(after["fc.weight"][:, 1:], before["fc.weight"][:, 1:])
    torch.testing.assert_close(after["fc.weight"][:, 0], before["fc.weight"][:, 0], rtol=2e-3, atol=0)


@pytest.mark.inductor
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam])
def test_half_parameters_are_updated_as_in_float32_and_rounded_once(kind, engine):
    """Both engines do; PyTorch rounds after every operation, and loses what is small."""
    torch.manual_seed(0)
    model = Regression().half()
    wide = copy.deepcopy(model).float()
    optimizer, wide_optimizer = kind(model.parameters(), lr=0.01), kind(wide.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, poptorch.Options().engine(engine), optimizer)
    x, target = (tensor.half() for tensor in batch(0))
    training(x, target)
    wide(x.float(), target.float())[1].backward()
    wide_optimizer.step()
    torch.testing.assert_close(model.fc.weight.float(), wide.fc.weight, rtol=1e-3, atol=1e-5)
    assert optimizer.state[model.fc.weight]["exp_avg_sq"].dtype == torch.float16
