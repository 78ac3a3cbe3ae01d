"""LightningModules whose layers are spread over IPUs."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from lightning_runs import QUIET, loader
from poptorch.lightning import IPUStrategy


class TwoIpus(pl.LightningModule):
    """The second layer is on IPU 1."""

    def __init__(self, blocks=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 8), nn.Linear(8, 2)
        if blocks:
            poptorch.BeginBlock(self.first, "first", ipu_id=0)
            poptorch.BeginBlock(self.second, "second", ipu_id=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.second(self.first(x).relu()), y)

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, devices=1):
    training = poptorch.Options().replicationFactor(devices)
    inference = poptorch.Options().deviceIterations(2).replicationFactor(devices)
    training.Training.gradientAccumulation(3)
    strategy = IPUStrategy(training_opts=training, inference_opts=inference)
    trainer = pl.Trainer(accelerator="ipu", devices=devices, strategy=strategy, **QUIET)
    trainer.fit(module, loader(count=60), loader(count=60))
    return trainer


@pytest.mark.parametrize("devices", [1, 2])
def test_a_pipelined_module_trains_as_an_ordinary_one(devices):
    found, expected = TwoIpus(), TwoIpus(blocks=False)
    fit(found, devices)
    fit(expected, devices)
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b)
