"""Native code: what only the inductor engine can get wrong."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(16 * 6 * 6, 4)

    def forward(self, x, labels):
        scores = self.head(self.features(x))
        return scores, F.cross_entropy(scores, labels)


@pytest.mark.inductor
def test_gradients_of_a_convolution_in_channels_last_are_those_of_float64(engine):
    torch.manual_seed(0)
    model = ConvNet()
    exact, before = copy.deepcopy(model).double(), copy.deepcopy(model.state_dict())
    x, labels = torch.randn(4, 8, 14, 14), torch.tensor([0, 1, 2, 3])
    options = poptorch.Options().engine(engine)
    poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))(x, labels)
    exact(x.double(), labels)[1].backward()
    for name, parameter in exact.named_parameters():
        step = before[name] - model.state_dict()[name]
        torch.testing.assert_close(step.double(), parameter.grad, rtol=1e-4, atol=1e-6)
    if engine == "inductor":
        assert model.features[0].weight.is_contiguous(memory_format=torch.channels_last)
