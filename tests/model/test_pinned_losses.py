"""Losses that train a layer until it does what is asked of it, and what partial losses return on the way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch


class Fitting(nn.Module):
    """A layer whose output a loss compares with a target."""

    def __init__(self, shape: tuple[int, ...], loss) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.fc, self.shape, self.loss = nn.Linear(10, 10), shape, loss

    def forward(self, x, target):
        y = self.fc(x.movedim(1, -1)).movedim(-1, 1)
        return y, self.loss(y, target)


def fit(shape: tuple[int, ...], loss, target: torch.Tensor, *, lr: float, steps: int) -> tuple[torch.Tensor, float]:
    """What the layer gives after so many steps, and its last loss."""
    module = Fitting(shape, loss)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    options = poptorch.Options().engine("eager")
    training = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=lr))
    for _ in range(steps - 1):
        training(x, target)
    y, value = training(x, target)
    return y, float(value.sum())


def _twice(y, target):
    scores = F.log_softmax(y, 1)
    return F.nll_loss(scores, target) + 5 * F.nll_loss(scores, target)


def test_two_losses_that_were_joined_are_learned():
    def joined(y, target):
        return poptorch.identity_loss(_twice(y, target), reduction="mean")

    y, loss = fit((1, 10), joined, torch.tensor([3]), lr=0.1, steps=300)
    assert y.argmax(1).tolist() == [3]
    assert loss < 0.1


def _squared_l1(y, target):
    return poptorch.identity_loss(F.l1_loss(y, target, reduction="none").pow(2) * 5, reduction="mean")


def _marked_twice(y, target):
    difference = poptorch.identity_loss(y - target, reduction="none")
    return poptorch.identity_loss(difference * difference * 5, reduction="mean")


def _squared_mean_l1(y, target):
    return poptorch.identity_loss(F.l1_loss(y, target).pow(2) * 5, reduction="mean")


TO_A_TARGET = {  # with the rate of learning and the number of steps that it takes
    "a loss that was squared": (_squared_l1, 0.1, 200),
    "a mean that was squared": (_squared_mean_l1, 0.02, 800),
    "a mark around a mark": (_marked_twice, 0.1, 200),
    "mse_loss, mean": (lambda y, t: F.mse_loss(y, t), 0.5, 200),
    "mse_loss, sum": (lambda y, t: F.mse_loss(y, t, reduction="sum"), 0.05, 200),
}


@pytest.mark.parametrize("loss", TO_A_TARGET)
def test_a_target_is_reached(loss):
    target = torch.rand(1, 10, generator=torch.Generator().manual_seed(2))
    function, lr, steps = TO_A_TARGET[loss]
    y, _ = fit((1, 10), function, target, lr=lr, steps=steps)
    torch.testing.assert_close(y, target, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_target_is_reached_by_absolute_values(reduction):
    """The steps of such a loss do not become smaller near the target, so it is missed by one of them at most."""
    target = torch.rand(1, 10, generator=torch.Generator().manual_seed(2))
    lr = 0.02 if reduction == "mean" else 0.002
    y, _ = fit((1, 10), lambda y, t: F.l1_loss(y, t, reduction=reduction), target, lr=lr, steps=800)
    torch.testing.assert_close(y, target, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("shape", "reduction"), [((1, 10), "mean"), ((1, 10), "sum"), ((1, 10, 2), "sum"), ((1, 10, 2, 3), "mean")]
)
@pytest.mark.parametrize("function", ["cross_entropy", "nll_loss"])
def test_labels_of_any_number_of_places_are_learned(shape, reduction, function):
    def loss(y, target):
        scores = F.log_softmax(y, 1) if function == "nll_loss" else y
        return getattr(F, function)(scores, target, reduction=reduction)

    labels = torch.full((1, *shape[2:]), 4)
    y, _ = fit(shape, loss, labels, lr=0.1, steps=100)
    assert torch.equal(y.argmax(1), labels)


def test_probabilities_are_learned():
    target = torch.rand(1, 10, generator=torch.Generator().manual_seed(2))
    y, _ = fit((1, 10), lambda y, t: F.binary_cross_entropy(torch.sigmoid(y), t), target, lr=5.0, steps=300)
    torch.testing.assert_close(torch.sigmoid(y), target, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_partial_loss_returns_its_own_value(reduction):
    """One that flows into another does not start the backward pass, but it reduces as it was told to."""

    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(10, 10)

        def forward(self, x, target):
            partial = poptorch.identity_loss(self.fc(x) - target, reduction=reduction)
            return partial, poptorch.identity_loss(partial * partial * 5, reduction="mean")

    module = Partial()
    x, target = torch.rand(1, 10), torch.rand(1, 10)
    difference = (module.fc(x) - target).detach()
    options = poptorch.Options().engine("eager")
    training = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.01))
    expected = difference if reduction == "none" else getattr(difference, reduction)()
    torch.testing.assert_close(training(x, target)[0], expected)
