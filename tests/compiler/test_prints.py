"""Titles of prints that have none: the names of what they print."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        x = poptorch.ipu_print_tensor(x)
        weight = poptorch.ipu_print_tensor(self.fc.weight, "")
        y = poptorch.ipu_print_tensor(poptorch.recomputationCheckpoint(x @ weight))
        return poptorch.ipu_print_tensor(y.topk(1).values)


@pytest.mark.parametrize("is_training", [False, True])
def test_titles(is_training, capfd):
    module = Layers()

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = module

        def forward(self, x):
            return poptorch.identity_loss(self.layers(x), "sum")

    wrapped = WithLoss()
    if is_training:
        model = poptorch.trainingModel(wrapped, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    else:
        model = poptorch.inferenceModel(wrapped)
    model(torch.ones(1, 2))
    found = [line.split(": ")[0] for line in capfd.readouterr().err.splitlines() if ": " in line]
    values = ["input/x", "layers.fc.weight", "layers/MatMul:0", "layers/Topk:0"]
    gradients = ["Gradient___layers/Topk:0", "Gradient___layers/MatMul:0", "Gradient___layers.fc.weight"]
    assert found == values + (gradients if is_training else [])
