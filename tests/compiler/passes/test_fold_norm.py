"""Batch norm disappears into the convolution before it, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch

NORM = torch.ops.aten._native_batch_norm_legit_no_training.default


def trained(*layers: nn.Module) -> nn.Module:
    """A network whose batch norms have seen data."""
    torch.manual_seed(0)
    network = nn.Sequential(*layers)
    network(torch.randn(8, 3, 6, 6))
    return network.eval()


def infer(network: nn.Module) -> poptorch.PoplarExecutor:
    return poptorch.inferenceModel(network, poptorch.Options().engine("eager"))


def norms(executor: poptorch.PoplarExecutor) -> int:
    assert executor._executable is not None
    return sum(node.target is NORM for node in executor._executable.step.graph.ops.nodes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_norm_after_a_convolution_is_folded(bias, affine):
    network = trained(nn.Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4, affine=affine), nn.ReLU())
    executor, x = infer(network), torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(executor(x), network(x).detach(), rtol=1e-5, atol=1e-6)
    assert norms(executor) == 0


def test_norm_that_does_not_follow_a_convolution_stays():
    network = trained(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4))
    executor, x = infer(network), torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(executor(x), network(x).detach(), rtol=1e-5, atol=1e-6)
    assert norms(executor) == 1


def test_convolution_that_is_used_twice_keeps_its_norm():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.convolution(x)
            return self.norm(y) + y

    network = trained(Twice())
    executor, x = infer(network), torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(executor(x), network(x).detach(), rtol=1e-5, atol=1e-6)
    assert norms(executor) == 1


def test_new_weights_are_folded_when_they_are_copied():
    network = trained(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    executor, x = infer(network), torch.randn(2, 3, 6, 6)
    executor(x)
    with torch.no_grad():
        network[0].weight.mul_(2)
        network[1].running_var.mul_(3)
    executor.copyWeightsToDevice()
    torch.testing.assert_close(executor(x), network(x).detach(), rtol=1e-5, atol=1e-6)


def test_half_weights_are_scaled_in_float32():
    """A channel that never varied has a scale of 316; its shift alone is beyond float16, the sum with it is not."""
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).half().eval()
    with torch.no_grad():
        network[0].weight.fill_(100.0)
        network[0].bias.fill_(0.25)
        network[1].running_mean.fill_(300.0)
        network[1].running_var.fill_(0.0)
    executor = infer(network)
    assert executor(torch.ones(1, 3, 2, 2).half()).flatten()[0] == pytest.approx(0.25 / 1e-5**0.5, rel=1e-3)
    assert norms(executor) == 0
