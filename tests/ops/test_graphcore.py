"""The custom ops of the domain `ai.graphcore`: against the same in PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch


class Through(nn.Module):
    """Parameters that go through an op of `ai.graphcore`."""

    def __init__(self, name, *tensors, **attributes):
        super().__init__()
        self.name, self.attributes = name, attributes
        self.tensors = nn.ParameterList(tensor.clone() for tensor in tensors)

    def forward(self, weights):
        inputs = list(self.tensors)
        (result,) = poptorch.custom_op(inputs, self.name, "ai.graphcore", 1, [inputs[0]], self.attributes)
        return result, poptorch.identity_loss(result * weights, "sum")


def gradients(name, *tensors, weights, engine="eager", **attributes):
    """What an op computes, and the gradients of its inputs."""
    model = Through(name, *tensors, **attributes)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    value, _ = poptorch.trainingModel(model, poptorch.Options().engine(engine), optimizer)(weights)
    return value, [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]


@pytest.mark.inductor
def test_autograd_proxy_has_the_value_of_the_first_and_the_gradient_of_the_second(engine):
    first, second, weights = torch.rand(4), torch.rand(4), torch.rand(4)
    value, (of_first, of_second) = gradients("AutogradProxy", first, second, weights=weights, engine=engine)
    assert torch.equal(value, first)
    assert torch.equal(of_first, torch.zeros(4))
    torch.testing.assert_close(of_second, weights)


@pytest.mark.inductor
@pytest.mark.parametrize(("name", "p"), [("L1Distance", 1), ("L2Distance", 2)])
def test_distances_of_all_pairs_of_rows(engine, name, p):
    torch.manual_seed(0)
    a, b, weights = torch.randn(3, 5), torch.randn(4, 5), torch.randn(3, 4)
    value, found = gradients(name, a, b, weights=weights, engine=engine)
    x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
    expected = torch.linalg.vector_norm(x.unsqueeze(1) - y, ord=p, dim=-1)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(tuple(found), torch.autograd.grad((expected * weights).sum(), (x, y)))


def test_distances_of_float16_rows():
    a, b = torch.randn(3, 5).half(), torch.randn(4, 5).half()
    value, _ = gradients("L1Distance", a, b, weights=torch.ones(3, 4).half())
    assert value.dtype == torch.float16
    torch.testing.assert_close(value, torch.cdist(a.float(), b.float(), p=1).half())


@pytest.mark.inductor
@pytest.mark.parametrize("way", ["quantise", "ste", "stop"])
def test_simulated_quant_in_each_direction(engine, way):
    torch.manual_seed(0)
    x, weights = torch.randn(64), torch.randn(64)
    ways = {"quantise": lambda t: t.bfloat16().float(), "ste": lambda t: t, "stop": torch.zeros_like}
    bits = {"exponent_bits": 8, "mantissa_bits": 7, "rounding": "nearest"}
    value, (gradient,) = gradients("SimulatedQuant", x, weights=weights, engine=engine, fwd=way, bwd="ste", **bits)
    assert torch.equal(value, ways[way](x))
    torch.testing.assert_close(gradient, weights)
    value, (gradient,) = gradients("SimulatedQuant", x, weights=weights, fwd="quantise", bwd=way, **bits)
    assert torch.equal(value, ways["quantise"](x))
    torch.testing.assert_close(gradient, ways[way](weights))


def test_simulated_quant_rounds_the_value_and_passes_the_gradient_by_default():
    value, (gradient,) = gradients(
        "SimulatedQuant", torch.tensor([1.3]), weights=torch.tensor([1.3]), exponent_bits=4, mantissa_bits=1
    )
    assert value.item() == 1.5
    torch.testing.assert_close(gradient, torch.tensor([1.3]))


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"exponent_bits": 4}, "'mantissa_bits' of SimulatedQuant is None: give an int from 0 to 23"),
        ({"exponent_bits": 9, "mantissa_bits": 3}, "'exponent_bits' of SimulatedQuant is 9: give an int from 2 to 8"),
        (
            {"exponent_bits": 4, "mantissa_bits": 3, "bwd": "stp"},
            "'bwd' of SimulatedQuant is 'stp'; did you mean 'stop'",
        ),
        ({"exponent_bits": 4, "mantissa_bits": 3, "rounding": "up"}, "'rounding' of SimulatedQuant is 'up'"),
    ],
)
def test_wrong_formats_are_refused(attributes, text):
    with pytest.raises(ValueError, match=text):
        gradients("SimulatedQuant", torch.ones(1), weights=torch.ones(1), **attributes)
