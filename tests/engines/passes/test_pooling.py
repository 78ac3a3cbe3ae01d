"""ReLU moves behind a max pooling where nobody can see the difference."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from rewrites import on_eager

RELU, POOL = torch.ops.aten.relu.default, torch.ops.aten.max_pool2d_with_indices.default


class Pooled(nn.Module):
    """A convolution, ReLU and pooling in an order that the test chooses, and a loss."""

    def __init__(self, after) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(2, 3, 3, padding=1)
        self.after = after

    def forward(self, x):
        y = self.after(self.convolution(x))
        return y, poptorch.identity_loss((y * y).sum() + y.sum(), reduction="none")


def order(graph) -> list[str]:
    """ReLU and pooling as they come in the step."""
    names = {RELU: "relu", POOL: "pool"}
    return [names[node.target] for node in graph.ops.nodes if node.target in names]


def trained(after, x: torch.Tensor, engine: str = "eager"):
    """Train one step compiled and one eager; give the order of the ops and both models."""
    model, reference = Pooled(after), Pooled(after)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, poptorch.Options().engine(engine), optimizer)
    executor(x)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    reference(x)[1].backward()
    optimizer.step()
    return order(on_eager(executor)), model, reference


def images() -> torch.Tensor:
    x = torch.randn(4, 2, 7, 7)
    x[0] = -5.0  # whole windows that ReLU clamps
    x[1, :, :4] = 1.0  # windows of equal elements
    return x


@pytest.mark.parametrize("kernel", [2, 3])
@pytest.mark.parametrize("stride", [2, 3])
def test_relu_moves_behind_the_pooling(kernel, stride):
    ops, model, reference = trained(lambda y: F.max_pool2d(torch.relu(y), kernel, stride), images())
    assert ops == ["pool", "relu"]
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.inductor
def test_pooling_backward_in_native_code(engine):
    def pooled(y):
        """With windows that tile the image, and with windows that leave a rest."""
        return F.max_pool2d(torch.relu(y), 2) + F.max_pool2d(torch.relu(y), 4)

    _, model, reference = trained(pooled, images()[..., :6, :6], engine)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_relu_that_others_read_stays():
    def read_twice(y):
        y = torch.relu(y)
        return F.max_pool2d(y, 2).sum() + y

    ops, model, reference = trained(read_twice, images())
    assert ops == ["relu", "pool"]
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_relu_stays_where_the_chosen_elements_are_returned():
    model = Pooled(lambda y: F.max_pool2d(torch.relu(y), 2, return_indices=True)[1].float())
    executor = poptorch.inferenceModel(model, poptorch.Options().engine("eager"))
    x = images()
    torch.testing.assert_close(executor(x)[0], model(x)[0])
    assert order(on_eager(executor)) == ["relu", "pool"]


def test_relu_moves_in_inference():
    model = Pooled(lambda y: F.max_pool2d(torch.relu(y), 2))
    executor = poptorch.inferenceModel(model, poptorch.Options().engine("eager"))
    x = images()
    torch.testing.assert_close(executor(x)[0], model(x)[0].detach())
    assert order(on_eager(executor)) == ["pool", "relu"]
