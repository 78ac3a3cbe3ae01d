"""identity_loss outside a compiled model: it reduces, and autograd goes through it."""

from __future__ import annotations

import pytest
import torch

import poptorch


@pytest.mark.parametrize(
    ("reduction", "value", "gradient"),
    [("mean", 2.0, [0.5, 0.5]), ("sum", 4.0, [1.0, 1.0]), ("none", None, [1.0, 1.0])],
)
def test_values_and_gradients_on_the_host(reduction, value, gradient):
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    loss = poptorch.identity_loss(x, reduction=reduction)
    assert torch.equal(loss, x if value is None else torch.tensor(value))
    loss.sum().backward()
    assert torch.equal(x.grad, torch.tensor(gradient))


def test_no_reduction_gives_a_copy():
    x = torch.ones(2)
    poptorch.identity_loss(x, "none").add_(1)
    assert torch.equal(x, torch.ones(2))


@pytest.mark.parametrize("reduction", ["average", "", None])
def test_unknown_reduction(reduction):
    with pytest.raises(AssertionError, match="Unsupported reduction type!"):
        poptorch.identity_loss(torch.ones(1), reduction)


def test_reduction_is_required():
    with pytest.raises(TypeError, match="reduction"):
        poptorch.identity_loss(torch.ones(1))
