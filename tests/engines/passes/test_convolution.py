"""The bias of a convolution gets its gradient from a sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from rewrites import on_eager

BACKWARD = torch.ops.aten.convolution_backward.default

LAYERS = {
    "1d": (lambda: nn.Conv1d(2, 4, 3), (3, 2, 9)),
    "2d": (lambda: nn.Conv2d(2, 4, 3), (3, 2, 9, 9)),
    "3d": (lambda: nn.Conv3d(2, 4, 3), (3, 2, 5, 5, 5)),
    "grouped": (lambda: nn.Conv2d(2, 4, 3, groups=2, stride=2), (3, 2, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 4, 3), (3, 2, 5, 5)),
}


class Convolved(nn.Module):
    def __init__(self, layer: nn.Module, pooled: bool = False) -> None:
        super().__init__()
        self.layer, self.pooled = layer, pooled

    def forward(self, x):
        y = self.layer(x)
        if self.pooled:
            y = F.max_pool2d(y, 3, 2)
        return y, poptorch.identity_loss((y * y).mean(), reduction="none")


def train_both(make, x: torch.Tensor, pooled: bool = False):
    """One step compiled, one eager, from equal weights."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Convolved(make(), pooled))
    model, reference = models
    executor = poptorch.trainingModel(
        model, poptorch.Options().engine("eager"), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    executor(x)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    reference(x)[1].backward()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    return on_eager(executor)


@pytest.mark.parametrize("kind", LAYERS)
def test_no_convolution_backward_computes_the_bias_gradient(kind):
    make, shape = LAYERS[kind]
    graph = train_both(make, torch.randn(shape))
    masks = [node.args[-1] for node in graph.ops.nodes if node.target is BACKWARD]
    assert masks == [[False, True, False]]


def test_gradient_behind_a_pooling_is_summed_where_it_is_small():
    graph = train_both(lambda: nn.Conv2d(2, 4, 3), torch.randn(3, 2, 9, 9), pooled=True)
    sums = [node for node in graph.ops.nodes if node.target is torch.ops.aten.sum.dim_IntList]
    assert [tuple(node.args[0].meta["val"].shape) for node in sums] == [(3, 4, 3, 3)]


def test_frozen_weight_leaves_no_convolution_backward():
    def frozen():
        layer = nn.Conv2d(2, 4, 3)
        layer.weight.requires_grad_(False)
        return layer

    graph = train_both(frozen, torch.randn(3, 2, 9, 9))
    assert not any(node.target is BACKWARD for node in graph.ops.nodes)
