"""Kinds of optimisers to test with, and small models for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from optim.banks import Given, options

o = poptorch.optim
OURS = [o.SGD, o.Adam, o.AdamW, o.RMSprop, o.LAMB]
TORCHS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop]
NO_BIAS = [(o.LAMB, {"bias_correction": False}), (o.AdamW, {"bias_correction": False})]
VARIANTS = [*[(kind, {}) for kind in (*OURS, *TORCHS)], *NO_BIAS]
HYPERS = {
    o.SGD: {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
    o.Adam: {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    o.AdamW: {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    o.RMSprop: {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
}


def name_of(value):
    kind, extra = value if isinstance(value, tuple) else (value, {})
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}{'-no-bias' if extra else ''}"


class Lin(nn.Module):
    """Model W of the specification."""

    def __init__(self, n: int = 10) -> None:
        super().__init__()
        self.lin = nn.Linear(n, n)

    def forward(self, x):
        y = F.log_softmax(self.lin(x.flatten()), dim=0)
        return y, poptorch.identity_loss(y**2, reduction="sum")


class Classifier(nn.Module):
    """Model L of the specification."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x, label):
        y = self.second(self.first(x))
        return y, F.cross_entropy(y, label)


def wrap(model, optimizer, made=None):
    return poptorch.trainingModel(model, made or options(), optimizer)


def small(kind, **settings):
    """A compiled model of one parameter and its optimiser."""
    model = Given()
    optimizer = kind(model.parameters(), **settings)
    return wrap(model, optimizer), optimizer


ROW = torch.ones(1, 3)
