"""Small LightningModules, and Trainers that keep quiet, for the tests of poptorch.lightning."""

from __future__ import annotations

import copy
import importlib

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import poptorch.lightning  # noqa: F401
from poptorch.lightning.packages import ROOTS

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


def rows(count=64, width=32, seed=0):
    """Data with labels that a linear layer can learn something about."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    return TensorDataset(x, (x[:, :2] * 0.5 + 0.1 * torch.randn(count, 2, generator=generator)))


def loader(batch_size=1, count=64, **arguments):
    return DataLoader(rows(count), batch_size=batch_size, **arguments)


def line_class(package):
    """The class `Line` for one of the two packages."""

    class Line(package.LightningModule):
        """A linear layer; steps compute a mean squared error. `configure` makes the optimiser."""

        def __init__(self, configure=None):
            super().__init__()
            self.fc = nn.Linear(32, 2)
            nn.init.constant_(self.fc.bias, 0.1)
            with torch.no_grad():
                self.fc.weight.copy_(torch.randn(2, 32, generator=torch.Generator().manual_seed(1)) * 0.1)
            self.configure = configure

        def forward(self, x):
            return self.fc(x)

        def loss(self, batch):
            x, y = batch
            return F.mse_loss(self(x), y)

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            return self.loss(batch)

        def test_step(self, batch, batch_idx):
            return self.loss(batch)

        def predict_step(self, batch, batch_idx):
            return self(batch[0])

        def configure_optimizers(self):
            if self.configure is not None:
                return self.configure(self)
            return torch.optim.SGD(self.parameters(), lr=0.02)

    return Line


Line = line_class(pl)


class Logs(Line):
    """Logs what its steps compute."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("t", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("v", self.loss(batch))


def sgd(module, **arguments):
    return torch.optim.SGD(module.parameters(), **{"lr": 0.02, **arguments})


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.01)


def root(name):
    """The module of a package that has the Trainer."""
    return importlib.import_module(ROOTS[name])


def trainer(accelerator="ipu", devices=1, package=pl, **arguments):
    """A Trainer without files and output."""
    return package.Trainer(accelerator=accelerator, devices=devices, **{**QUIET, **arguments})


def fit(module, train=None, validation=None, **arguments):
    """Train, and give the Trainer."""
    chosen = trainer(**arguments)
    chosen.fit(module, train if train is not None else loader(), validation)
    return chosen


def fit_both(make, batch_size=1, cpu_batch_size=None, count=64, cpu=None, validation=None, **arguments):
    """The same module trained on IPUs and on the CPU, with both Trainers: (module, trainer), (module, trainer)."""
    first = make()
    second = copy.deepcopy(first)
    ipu = fit(first, loader(batch_size, count), validation, **arguments)
    host_arguments = {
        name: value
        for name, value in arguments.items()
        if name not in ("devices", "strategy", "accumulate_grad_batches")
    }
    host_arguments.update(cpu or {})
    host = fit(second, loader(cpu_batch_size or batch_size, count), validation, accelerator="cpu", **host_arguments)
    return (first, ipu), (second, host)


def assert_same_weights(first, second, tolerance=1e-5):
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=tolerance, atol=tolerance)
