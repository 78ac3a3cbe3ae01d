"""A model that uses what a file has to keep, and programs that save it, load it and go on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import poptorch


class Tied(nn.Module):
    """Two layers that share a weight, a normalisation, dropout, a buffer that is not saved, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.register_buffer("shift", torch.tensor([0.5]), persistent=False)
        self.outside = [torch.arange(6.0)]

    def forward(self, x, target, *, scale: float = 1.0):
        y = self.drop(self.norm(self.first(x))).tanh()
        y = self.second(y) * scale + self.shift + self.outside[0]
        return {"y": y, "pair": (y.sum(), None)}, F.mse_loss(y, target)


def batches(count: int):
    generator = torch.Generator().manual_seed(7)
    return [tuple(torch.randn(4, 6, generator=generator) for _ in range(2)) for _ in range(count)]


def make_optimizer(kind: str, parameters) -> torch.optim.Optimizer:
    """By a name such as `torch.Adam` or `poptorch.LAMB`."""
    library, _, name = kind.partition(".")
    module = torch.optim if library == "torch" else poptorch.optim
    numbers = {} if name in ("Adadelta", "Adafactor", "Rprop") else {"lr": 0.05}
    if name == "SGD":
        numbers["momentum"] = 0.9
    return getattr(module, name)(list(parameters), **numbers)


def training_model(kind: str = "torch.AdamW", engine: str = "eager") -> poptorch.PoplarExecutor:
    torch.manual_seed(0)
    model = Tied()
    options = poptorch.Options().engine(engine)
    options.Training.gradientAccumulation(2)
    return poptorch.trainingModel(model, options, make_optimizer(kind, model.parameters()))


def train(training: poptorch.PoplarExecutor, some_batches) -> list[torch.Tensor]:
    return [training(x, target)[1] for x, target in some_batches]


# What a process does that knows nothing but the file: train on, and keep what can be compared.
GO_ON = """
import sys
import torch, poptorch
torch.set_num_threads(1)  # as the tests do: the order of sums counts
given = torch.load({batches!r})
training = poptorch.load({file!r})
losses = [training(x, target)[1].clone() for x, target in given]
assert "saved_models" not in sys.modules
state = [optimizer.state_dict()["state"] for optimizer in training._programs.optimizers.optimizers]
torch.save([losses, training.state_dict(), state], {result!r})
"""
