"""Losses and which parameters a training call changes, as the original's tests pin it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch


def options() -> poptorch.Options:
    return poptorch.Options().engine("eager")


class WithLoss(nn.Module):
    """A linear layer and a loss that each test gives."""

    def __init__(self, loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.loss = nn.Linear(4, 4), loss

    def forward(self, x, target):
        y = self.fc(x)
        return y, self.loss(y, target)


def train(module: nn.Module, lr: float = 0.1, parameters=None) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(module, options(), torch.optim.SGD(parameters or module.parameters(), lr=lr))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 4, generator=generator), torch.rand(6, 4, generator=generator)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [F.l1_loss, F.mse_loss, F.smooth_l1_loss])
def test_reduced_losses_are_the_native_ones(loss, reduction):
    module = WithLoss(lambda y, t: loss(y, t, reduction=reduction))
    expected = module(*batch())[1].detach()
    result = train(module)(*batch())[1]
    assert result.numel() == 1
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("outer", ["mean", "sum"])
def test_unreduced_loss_inside_identity_loss(outer):
    module = WithLoss(lambda y, t: poptorch.identity_loss(F.l1_loss(y, t, reduction="none"), outer))
    expected = module(*batch())[1].detach()
    torch.testing.assert_close(train(module)(*batch())[1], expected)


def _nll(y, t):
    return poptorch.identity_loss(F.nll_loss(F.log_softmax(y, 1), t.argmax(1)), "mean")


CUSTOM = {
    "l1": lambda y, t: poptorch.identity_loss(F.l1_loss(y, t), "mean"),
    "nll": _nll,
    "arithmetic": lambda y, t: poptorch.identity_loss((y - t) ** 2 * 5, "mean"),
    "weighted sum": lambda y, t: poptorch.identity_loss(_nll(y, t) + 5 * _nll(y, t), "none"),
}


@pytest.mark.parametrize("loss", CUSTOM)
def test_custom_losses_train_as_natively(loss):
    x, target = batch()
    native = WithLoss(CUSTOM[loss])
    optimizer = torch.optim.SGD(native.parameters(), lr=0.1)
    expected = []
    for _ in range(10):
        optimizer.zero_grad()
        value = native(x, target)[1]
        value.backward()
        optimizer.step()
        expected.append(value.item())
    training = train(WithLoss(CUSTOM[loss]))
    assert [training(x, target)[1].item() for _ in range(10)] == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]


def test_two_losses_are_refused_unless_joined():
    def both(y, t):
        log = F.log_softmax(y, 1)
        return F.nll_loss(log, t.argmax(1)) + 5 * F.nll_loss(log, t.argmin(1))

    with pytest.raises(poptorch.Error, match="Multiple independent losses found"):
        train(WithLoss(both))(*batch())
    joined = WithLoss(lambda y, t: poptorch.identity_loss(both(y, t), "none"))
    training = train(joined)
    assert training(*batch())[1] > training(*batch())[1]


def test_no_loss():
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph"):
        train(WithLoss(lambda y, t: y.sum()))(*batch())


def test_results_computed_beside_a_missing_loss_do_not_count():
    class Lossless(Layers):
        def forward(self, x, target):
            y = self.fc(x)
            return y, y * 12, target + 1

    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph"):
        train(Lossless())(*batch())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_identity_loss_beside_the_output_it_reduces(reduction):
    module = WithLoss(lambda y, t: poptorch.identity_loss(y, reduction))
    expected = module(*batch())
    y, loss = train(module)(*batch())
    torch.testing.assert_close((y, loss), tuple(t.detach() for t in expected))
    assert (y.shape, loss.shape) == ((6, 4), ())


def _parts(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Linear(4, 4)

    def forward(self, x, target):
        y = self.fc(self.body(x))
        return y, F.mse_loss(y, target)


def test_frozen_parameters_stay_while_the_others_learn():
    module = Layers()
    module.body[0].weight.requires_grad = False
    before = _parts(module)
    training = train(module)
    losses = [training(*batch())[1].item() for _ in range(20)]
    changed = {name for name, now in _parts(module).items() if not torch.equal(now, before[name])}
    assert changed == set(before) - {"body.0.weight"}
    assert losses[1] != losses[0]


def test_fine_tuning_changes_the_last_layer_only():
    module = Layers()
    for parameter in module.body.parameters():
        parameter.requires_grad = False
    before = _parts(module)
    training = train(module, parameters=list(module.fc.parameters()))
    for _ in range(20):
        training(*batch())
    changed = {name for name, now in _parts(module).items() if not torch.equal(now, before[name])}
    assert changed == {"fc.weight", "fc.bias"}


def test_first_loss_is_that_of_the_initial_weights():
    module = Layers()
    expected = module(*batch())[1].detach()
    torch.testing.assert_close(train(module)(*batch())[1], expected)
