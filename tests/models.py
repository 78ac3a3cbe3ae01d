"""Small models that many tests share. Golden texts quote these lines, so add new models at the end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Regression(nn.Module):
    """One linear layer and a mean squared error."""

    def __init__(self, inputs: int = 3, outputs: int = 2) -> None:
        super().__init__()
        self.fc = nn.Linear(inputs, outputs)

    def forward(self, x, target):
        y = self.fc(x)
        return y, F.mse_loss(y, target)


class Scale(nn.Module):
    """One number times the input; without a target it returns only the product."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([factor]))

    def forward(self, x):
        return x * self.factor


class Gate(nn.Module):
    """Takes another path when the input is negative: Python reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x, target):
        y = self.fc(x)
        if x.sum() > 0:
            y = y * 2
        return y, F.mse_loss(y, target)


class Apply(nn.Module):
    """Calls a function, so that each test can say in one line what forward does."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)
