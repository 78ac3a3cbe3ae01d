"""Random rounding to float16: unbiased, between the two neighbours, and only where it was asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Apply


def options(engine: str = "eager", *, at_random: bool = True, accumulation: int = 1) -> poptorch.Options:
    found = poptorch.Options().engine(engine).randomSeed(3)
    found.Precision.enableStochasticRounding(at_random)
    found.Training.gradientAccumulation(accumulation)
    return found


def rounded(function, x: torch.Tensor, engine: str = "eager", at_random: bool = True) -> torch.Tensor:
    return poptorch.inferenceModel(Apply(function), options(engine, at_random=at_random))(x)


@pytest.mark.parametrize("number", [1.0003, -1.0003, 1000.3, 6.2e-5, 3.01e-6, -1e-5, 2e-8])
def test_a_number_becomes_each_of_its_neighbours_as_often_as_it_is_close_to_it(number):
    x = torch.full((20_000,), number)
    result = rounded(lambda x: x.half(), x)
    found = result.unique().double()
    assert len(found) == 2
    low, high = found.tolist()
    assert low < number < high
    assert torch.nextafter(found[0].half(), found[1].half()) == found[1].half()
    share = (x[0].double().item() - low) / (high - low)
    assert (result.double() == high).double().mean().item() == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("number", [0.0, 2.0, -0.5, 65504.0, 2.0**-24, float("inf"), -float("inf"), float("nan")])
def test_what_float16_has_stays_what_it_is(number):
    result = rounded(lambda x: x.half(), torch.full((100,), number))
    torch.testing.assert_close(result, torch.full((100,), number).half(), rtol=0, atol=0, equal_nan=True)


ARITHMETIC = {
    "product": lambda x: x @ torch.full((100, 100), 0.0123).half(),
    "sum": lambda x: x.sum(1),
    "element-wise": lambda x: x * 0.123 + 0.0017,
    "softmax": lambda x: x.softmax(1),
    "norm": lambda x: F.layer_norm(x + torch.arange(100).half() / 64, (100,)),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_is_right_on_average(name):
    function = ARITHMETIC[name]
    x = torch.full((500, 100), 0.7001).half()
    result, nearest = rounded(function, x), rounded(function, x, at_random=False)
    assert result.dtype is nearest.dtype is torch.float16
    expected = (
        function(x.double()) if name != "product" else x.double() @ torch.full((100, 100), 0.0123).half().double()
    )
    error = (result.double().mean(0) - expected.mean(0)).abs().max()
    assert error <= (nearest.double().mean(0) - expected.mean(0)).abs().max() + 1e-6
    assert not torch.equal(result, nearest)


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000, dtype=torch.float16))

    def forward(self, x):
        return poptorch.identity_loss((self.weight * x).sum(), "none")


def trained_mean(engine: str, *, at_random: bool, accumulation: int = 1) -> float:
    """A weight of ones after twenty steps of 0.0001."""
    model = Weight()
    chosen = options(engine, at_random=at_random, accumulation=accumulation)
    training = poptorch.trainingModel(model, chosen, torch.optim.SGD(model.parameters(), lr=1e-4))
    for _ in range(20):
        training(torch.ones(accumulation, 1000).half())
    return model.weight.double().mean().item()


@pytest.mark.inductor
def test_updates_too_small_for_float16_add_up(engine):
    assert trained_mean(engine, at_random=True) == pytest.approx(1 - 20e-4, abs=3e-4)


def test_so_do_updates_from_accumulated_gradients():
    assert trained_mean("eager", at_random=True, accumulation=2) == pytest.approx(1 - 20e-4, abs=3e-4)


def test_without_it_they_are_lost():
    assert trained_mean("eager", at_random=False) == 1.0, "each is less than half the distance to the next number"


def test_the_seed_decides_and_every_call_rounds_anew():
    x = torch.full((100,), 1.0003)
    first, second = (poptorch.inferenceModel(Apply(lambda x: x.half()), options()) for _ in range(2))
    one, two = first(x), first(x)
    assert torch.equal(one, second(x))
    assert not torch.equal(one, two)


def test_float32_is_left_alone():
    x = torch.rand(100)
    assert torch.equal(rounded(lambda x: x * 3 + 1, x), x * 3 + 1)
