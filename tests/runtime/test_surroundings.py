"""Switches of PyTorch that are set around a call do not change what a compiled program computes."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import poptorch


class Model(nn.Module):
    """Multiplies matrices, divides integers and makes numbers of the default type."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, n):
        y = self.fc(x) + torch.linspace(0, 1, 3) + n / 3
        return y, nn.functional.mse_loss(y, torch.ones_like(y))


@contextmanager
def default_type(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS = {
    "nothing": lambda: torch.enable_grad(),
    "autocasting": lambda: torch.autocast("cpu", torch.bfloat16),
    "another default type": lambda: default_type(torch.float64),
    "inference mode": lambda: torch.inference_mode(),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_compiled_program_computes_the_same(name, engine):
    torch.manual_seed(0)
    model = Model()
    x, n = torch.randn(4, 3), torch.arange(12).view(4, 3)
    options = poptorch.Options().engine(engine)
    inference = poptorch.inferenceModel(model, options)
    expected = inference(x, n)
    with SURROUNDINGS[name]():
        found = inference(x, n)
        inference.copyWeightsToDevice()
        again = inference(x, n)
    for a, b, c in zip(expected, found, again, strict=True):
        assert a.dtype is b.dtype is c.dtype
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_compiled_training_program_computes_the_same(name):
    x, n = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.arange(12).view(4, 3)
    weights = []
    for surroundings in (SURROUNDINGS["nothing"], SURROUNDINGS[name]):
        torch.manual_seed(0)
        model = Model()
        training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        training(x, n)
        with surroundings():
            training(x, n)
        weights.append(model.fc.weight.detach().clone())
    assert torch.equal(*weights)
