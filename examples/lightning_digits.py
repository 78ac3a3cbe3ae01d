"""Train a classifier of handwritten digits with a Lightning Trainer on an emulated IPU, and test it on the CPU.

The module is an ordinary LightningModule; only the arguments of the Trainer speak of IPUs. A second Trainer trains the
same module on the CPU, to compare the speed. Run it with `python examples/lightning_digits.py --epochs 5`.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from poptorch.lightning import IPUStrategy

BATCH_SIZE = 16  # rows that one forward pass sees
STEPS_PER_CALL = 8  # weight updates that one batch of the Trainer makes on the IPU


class Digits(pl.LightningModule):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        scores = self.net(images)
        self.accuracy(scores, labels)
        self.log("accuracy", self.accuracy)
        self.log("validation_loss", F.cross_entropy(scores, labels))

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)]


def loaders() -> tuple[DataLoader, DataLoader]:
    """The images to train on, and those to validate with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, rest = (TensorDataset(images[part], labels[part]) for part in (order[357:], order[:357]))
    return DataLoader(train, BATCH_SIZE, shuffle=True, drop_last=True), DataLoader(rest, BATCH_SIZE)


class Clock(pl.Callback):
    """How long the training part of each epoch took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer, pl_module):
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.is_last_batch:
            self.seconds.append(time.perf_counter() - self._start)


def fit(epochs: int, folder: str, **arguments) -> tuple[pl.Trainer, float]:
    """Train on one kind of device; gives the Trainer, and the seconds of an epoch without those of compiling."""
    clock = Clock()
    best = pl.callbacks.ModelCheckpoint(folder, monitor="validation_loss")
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[clock, best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    torch.manual_seed(0)
    trainer.fit(Digits(), *loaders())
    return trainer, statistics.median(clock.seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", ".*(workers|skipped|treespec|dirpath).*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)

    with tempfile.TemporaryDirectory() as folder:
        strategy = IPUStrategy(device_iterations=STEPS_PER_CALL)
        ipu, ipu_seconds = fit(arguments.epochs, folder, accelerator="ipu", devices=1, strategy=strategy)
        print(
            f"Loss {ipu.callback_metrics['loss']:.4f} after {ipu.global_step} calls of {STEPS_PER_CALL} updates each."
        )
        host, host_seconds = fit(arguments.epochs, folder + "/cpu", accelerator="cpu")
        (tested,) = host.test(
            Digits(), loaders()[1], ckpt_path=ipu.checkpoint_callback.best_model_path, verbose=False, weights_only=True
        )
    print(f"Accuracy on images it has never seen: {tested['accuracy']:.1%}, tested on the CPU from the checkpoint.")
    print(f"An epoch takes {ipu_seconds * 1e3:.0f} ms, {host_seconds / ipu_seconds:.1f} times as fast as on the CPU.")


if __name__ == "__main__":
    main()
