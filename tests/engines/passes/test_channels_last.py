"""Weights of convolutions have their channels innermost, also where they are cast on the way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from poptorch.engines.host import Host, run_host_passes, unobserved
from poptorch.engines.passes.channels_last import convolution_weights, use_channels_last
from poptorch.engines.passes.widen import widen_products
from poptorch.ir import StepGraph

aten = torch.ops.aten
_WEIGHT_OF = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
WAYS = {"float32": (torch.float32, torch.float32), "half": (torch.float16, torch.float16)}
WAYS["float16 activations"] = (torch.float32, torch.float16)


class Images(nn.Module):
    """Without max pooling, which may choose another element where two are equal after rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 2, 3))

    def forward(self, x):
        y = self.layers(x)
        return y, poptorch.identity_loss((y.float() ** 2).mean(), reduction="none")


def train_once(weights: torch.dtype, fed: torch.dtype, engine: str):
    torch.manual_seed(0)
    model = Images().to(weights)
    options = poptorch.Options().engine(engine)
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.5))
    return model, executor, executor(torch.randn(2, 1, 12, 12).to(fed))


def captured(executor) -> StepGraph:
    return executor._executable.step.graph


def laid_out(executor) -> StepGraph:
    graph = captured(executor)
    host = Host(channels_last=convolution_weights([graph]))
    return run_host_passes(graph, host, (widen_products, use_channels_last), unobserved)


@pytest.mark.parametrize("way", WAYS)
def test_the_weights_of_convolutions_are_found_behind_casts(way):
    _, executor, _ = train_once(*WAYS[way], "eager")
    assert convolution_weights([captured(executor)]) == {"layers.0.weight", "layers.3.weight"}


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_with_one_channel_keeps_its_strides_when_it_is_cast(way):
    """It lies in memory as always, but kernels go by the strides."""
    _, executor, _ = train_once(*WAYS[way], "eager")
    weights = [node.args[_WEIGHT_OF[node.target]] for node in laid_out(executor).ops.nodes if node.target in _WEIGHT_OF]
    strides = [weight.meta["val"].stride() for weight in weights if weight.meta["val"].shape[1] == 1]
    assert strides == [(9, 1, 3, 1)] * 2  # forward and backward


def test_a_weight_that_nobody_laid_out_keeps_its_strides():
    _, executor, _ = train_once(torch.float16, torch.float16, "eager")
    graph = captured(executor)
    assert use_channels_last(graph, Host(channels_last=frozenset())) is graph
    only_second = Host(channels_last=frozenset({"layers.3.weight"}))
    ops = run_host_passes(graph, only_second, (widen_products, use_channels_last), unobserved).ops
    assert not any(node.target is aten.as_strided.default for node in ops.nodes)


@pytest.mark.inductor
@pytest.mark.parametrize("way", ["half", "float16 activations"])
def test_a_step_in_half_precision_is_that_of_float32_up_to_rounding(way, engine):
    model, _, (y, loss) = train_once(*WAYS[way], engine)
    wide, _, (wide_y, wide_loss) = train_once(*WAYS["float32"], "eager")
    torch.testing.assert_close(y.float(), wide_y, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(loss, wide_loss, rtol=5e-3, atol=5e-3)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.float(), wide.get_parameter(name).detach(), rtol=5e-3, atol=5e-3)
