"""The gradients of the pieces of a tensor are joined, and only where the pieces are all of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch

aten = torch.ops.aten
EAGER = poptorch.Options().engine("eager")
SPREAD = (aten.select_backward.default, aten.slice_backward.default)


class Cut(nn.Module):
    """A parameter, and a forward pass that the test chooses."""

    def __init__(self, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0)))
        self.function = function

    def forward(self, x):
        y = self.function(torch.tanh(self.weight), x)
        return poptorch.identity_loss((y * y).sum(), reduction="none")


def train(function):
    """One step compiled and one in plain PyTorch: what is still spread out, and both weights."""
    model, reference, x = Cut(function), Cut(function), torch.linspace(0.5, 2.0, 6)
    executor = poptorch.trainingModel(model, EAGER, torch.optim.SGD(model.parameters(), lr=0.1))
    executor(x)
    reference(x).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    nodes = executor._executable.step.graph.ops.nodes
    return sum(node.target in SPREAD for node in nodes), model.weight, reference.weight


JOINED = {
    "indices": lambda w, x: w[0] * x + w[1].sin() + w[2] * w[3],
    "indices of another dimension": lambda w, x: w[:, -1] * x + w[:, 1].sin() + w[:, -3],
    "slices": lambda w, x: (w[..., :2] * x[:2]).sum() + (w[..., 2:5].sin() * x[0]).sum() + w[..., 5:].exp().sum(),
    "in another order": lambda w, x: w[2:].sin() * x + w[:2] * 2,
    "with more added": lambda w, x: torch.cat([-w[..., 3:], w[..., :3]], -1) * x + w * 3,  # rotary embeddings
}
LEFT_ALONE = {
    "a gap": (lambda w, x: w[0] * x + w[1].sin() + w[3], 3),
    "an overlap": (lambda w, x: w[:2] * x + w[1:3].sin() + w[2:], 3),
    "one index twice": (lambda w, x: w[0] * x + w[1].sin() + w[2] + w[3] + w[3].exp(), 5),
    "steps": (lambda w, x: w[::2] * x + w[1::2].sin(), 2),
    "two dimensions": (lambda w, x: w[:, 0] * x + w[0].sum() + w[1:].sum() * w[:, 1], 4),
}


@pytest.mark.parametrize("function", JOINED.values(), ids=JOINED)
def test_pieces_that_are_the_whole_tensor_are_joined(function):
    spread, ours, theirs = train(function)
    assert spread == 0
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("function", "count"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_other_pieces_are_left_alone(function, count):
    spread, ours, theirs = train(function)
    assert spread >= count - 1  # autograd may add gradients of the same piece before it spreads them
    torch.testing.assert_close(ours, theirs)


def test_a_sum_that_is_used_twice_is_joined_once():
    """The gradient of the joined tensor goes on to two places."""
    _, ours, theirs = train(lambda w, x: (w.exp() + w.sin())[:2] * x + (w.exp() + w.sin())[2:].cos())
    torch.testing.assert_close(ours, theirs)


def test_packed_attention():
    """PyTorch's own attention cuts queries, keys and values out of one projection."""
    torch.manual_seed(0)
    model = Encoder()
    executor = poptorch.trainingModel(model, EAGER, torch.optim.SGD(model.parameters(), lr=0.1))
    executor(torch.randn(2, 5, 8))
    assert not any(node.target in SPREAD for node in executor._executable.step.graph.ops.nodes)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return poptorch.identity_loss(self.layer(x).square().sum(), reduction="none")
