"""Parameters on the meta device get the values that the model would have been built with, or a clear error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch


class Scaled(nn.Module):
    """A model with a parameter of its own, and no way to initialise it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        y = self.layers(x) * self.scale
        return y, poptorch.identity_loss(y.sum(), reduction="none")


class Initialised(Scaled):
    def reset_parameters(self):
        nn.init.ones_(self.scale)


def training(kind):
    with torch.device("meta"):
        model = kind()
    return model, poptorch.trainingModel(model, poptorch.Options(), torch.optim.Adam(model.parameters()))


def test_values_are_those_of_a_model_that_was_built_with_them():
    model, wrapped = training(Initialised)
    torch.manual_seed(0)
    wrapped.compile(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(0)
    expected = Initialised().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_module_that_cannot_initialise_its_parameter_is_named():
    _, wrapped = training(Scaled)
    with pytest.raises(poptorch.Error, match=r"scale has no values(.|\n)*Scaled has no reset_parameters"):
        wrapped.compile(torch.randn(3, 4))


def test_inference_needs_values():
    with torch.device("meta"):
        model = Initialised().eval()
    with pytest.raises(poptorch.Error, match="has no values: it is on the meta device, and the model is not trained"):
        poptorch.inferenceModel(model).compile(torch.randn(3, 4))
