"""Products of 16-bit floats are computed in float32; what is kept in memory stays 16 bits wide."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from poptorch.ir import Direction, note_of
from rewrites import on_eager

aten = torch.ops.aten
EAGER = poptorch.Options().engine("eager")
NARROW = (torch.float16, torch.bfloat16)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).flatten(1)


class Products(nn.Module):
    """Every kind of product that is not a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.vector = nn.Parameter(torch.randn(8))

    def forward(self, x):
        batch = x @ self.weight
        y = torch.baddbmm(batch, batch, self.weight.expand(len(x), 8, 8), alpha=0.5)
        y = y + torch.addbmm(self.weight[:6], x, x.mT @ x)
        y = y + torch.addmv(x[0, :, 0], x[0], self.vector)[:, None]
        return (y + self.weight.mv(self.vector) + torch.dot(self.vector, self.vector)).flatten(1)


class Cells(nn.Module):
    """A recurrent layer whose steps are written out."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 5)

    def forward(self, x):
        state = None
        for part in x.unbind(1):
            state = self.cell(part, state)
        return state[0]


def convolutions() -> nn.Module:
    first = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(nn.Unflatten(0, (4, 1)), *first, nn.ConvTranspose2d(4, 2, 3), nn.Flatten())


NETWORKS = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 5)),
    "no bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 5, bias=False), nn.Tanh()),
    "convolution": convolutions,
    "attention": Attention,
    "products": Products,
    "lstm": lambda: nn.Sequential(nn.LSTM(8, 5, batch_first=True), First(), nn.Flatten()),
    "cells": Cells,
}


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


class WithLoss(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x):
        y = self.network(x)
        return y, poptorch.identity_loss((y.float() ** 2).mean(), reduction="none")


def network(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return WithLoss(NETWORKS[kind]()).to(dtype)


def inputs(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def narrow_products(executor) -> list[str]:
    """The products of a program that still have 16-bit operands."""
    program = on_eager(executor)
    products = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "convolution", "attention")
    return [
        node.name
        for node in program.ops.nodes
        if node.op == "call_function" and any(part in node.target.__name__ for part in products)
        if any(operand.meta["val"].dtype in NARROW for operand in node.all_input_nodes)
    ]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("kind", NETWORKS)
def test_training_is_as_in_float32_up_to_rounding(kind, dtype):
    model, wide = network(kind, dtype), network(kind, dtype).float()
    before = {name: value.clone() for name, value in wide.state_dict().items()}
    executor = poptorch.trainingModel(model, EAGER, torch.optim.SGD(model.parameters(), lr=0.5))
    y, _ = executor(inputs(dtype))
    expected, loss = wide(inputs(dtype).float())
    loss.backward()
    torch.optim.SGD(wide.parameters(), lr=0.5).step()
    assert narrow_products(executor) == []
    assert y.dtype is (torch.float32 if dtype is torch.bfloat16 else dtype)
    expected, precision = expected.detach(), torch.finfo(dtype).eps
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=20 * precision * float(expected.abs().max()))
    for name, parameter in model.named_parameters():
        moved, target = parameter.float() - before[name], wide.get_parameter(name).detach() - before[name]
        scale = float(target.abs().max()) + float(before[name].abs().max())
        torch.testing.assert_close(moved, target, rtol=0, atol=20 * precision * scale)


@pytest.mark.parametrize("kind", NETWORKS)
def test_inference_rounds_each_product_once(kind):
    model = network(kind, torch.float16).eval()
    executor = poptorch.inferenceModel(model.network, EAGER)
    y = executor(inputs(torch.float16))
    expected = network(kind, torch.float16).eval().float().network(inputs(torch.float16).float()).detach()
    assert narrow_products(executor) == []
    torch.testing.assert_close(y.float(), expected, rtol=5e-3, atol=5e-3 * float(expected.abs().max()))


def test_weights_are_widened_once_per_set_of_weights():
    executor = poptorch.inferenceModel(nn.Linear(3, 2).half(), EAGER)
    executor(torch.ones(1, 3).half())
    casts = [n for n in on_eager(executor).ops.nodes if n.target is aten._to_copy.default]
    assert len(casts) == 2  # the activation and the result


def casts_to_float32(executor) -> list[str]:
    """What is widened for a product, by name; the update has casts of its own."""
    nodes = [n for n in on_eager(executor).ops.nodes if n.target is aten._to_copy.default]
    found = [n for n in nodes if n.kwargs["dtype"] is torch.float32 and note_of(n).direction is not Direction.UPDATE]
    return [n.args[0].name for n in found if n.args[0].meta["val"].dtype in NARROW]


def test_products_share_the_wide_form_of_an_operand():
    """Weights are widened once and not for every time step, the input not for every time that it is expanded."""
    executor = poptorch.inferenceModel(network("cells", torch.float16).eval().network, EAGER)
    executor(inputs(torch.float16))
    derived = [spec.shape for spec in on_eager(executor).signature.inputs if spec.name.startswith("prepared")]
    assert sorted(derived) == [(20,), (20,), (20, 5), (20, 8)]


@pytest.mark.parametrize("kind", NETWORKS)
def test_training_widens_inputs_once_and_other_values_once_per_pass(kind):
    model = network(kind, torch.float16)
    executor = poptorch.trainingModel(model, EAGER, torch.optim.SGD(model.parameters(), lr=0.5))
    executor(inputs(torch.float16))
    widened = casts_to_float32(executor)
    places = {node.name for node in on_eager(executor).placeholders}
    assert all(widened.count(name) <= (1 if name in places else 2) for name in widened)


def test_convolution_with_float32_statistics_of_its_norm():
    """`half()` of everything, then the statistics back to float32, as programs for IPUs did."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).half().eval()
    model[1].running_mean, model[1].running_var = torch.randn(4), torch.rand(4) + 0.5
    x = torch.randn(2, 1, 5, 5)
    y = poptorch.inferenceModel(model, EAGER)(x.half())
    assert y.dtype is torch.float16
    torch.testing.assert_close(y.float(), model.float()(x), rtol=1e-2, atol=1e-2)


def test_sums_are_float32():
    """Ones beyond 2048 cannot be counted in float16."""
    y = poptorch.inferenceModel(Counter(), EAGER)(torch.ones(1, 8192).half())
    assert y.item() == 8192.0


class Counter(nn.Module):
    def forward(self, x):
        return x @ x.t()


def test_a_graph_without_16_bit_products_is_left_alone():
    executor = poptorch.inferenceModel(nn.Linear(3, 2), EAGER)
    executor(torch.ones(1, 3))
    assert not any(n.target is aten._to_copy.default for n in on_eager(executor).ops.nodes)


@pytest.mark.inductor
@pytest.mark.parametrize("kind", ["convolution", "attention"])
def test_native_code_computes_the_same(kind, engine):
    model, reference = network(kind, torch.float16), network(kind, torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, poptorch.Options().engine(engine), optimizer)
    executor(inputs(torch.float16))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    reference(inputs(torch.float16))[1].backward()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-3)
