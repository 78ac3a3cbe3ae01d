"""Train in several processes, and go on after a failure from the last checkpoint.

    poprun --num-instances 2 --max-restarts 2 examples/resume.py --folder checkpoints --dies-at 1:5

Process 1 is killed at update 5. torchrun then starts all processes again; they go on from the last checkpoint that is
complete, and end with the loss that they would have had without the accident.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn

import popdist
import popdist.poptorch
import poptorch


class Model(nn.Module):
    """A regression with dropout, so that random numbers matter too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, x, target):
        y = self.layers(x)
        return y, nn.functional.mse_loss(y, target)


def data() -> torch.utils.data.TensorDataset:
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=numbers)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())


def train(folder: Path, epochs: int, dies_at: tuple[int, int] | None = None) -> float:
    """The loss of process 0 in the last update."""
    popdist.init()
    options = popdist.poptorch.Options().randomSeed(0)
    torch.manual_seed(0)
    module = Model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    training = poptorch.trainingModel(module, options, optimizer)
    loader = poptorch.DataLoader(options, data(), batch_size=32, drop_last=True)
    training.compile(*next(iter(loader)))
    done = training.loadCheckpoint(folder) or 0  # epochs
    updates, loss = done * len(loader), torch.zeros(())
    for epoch in range(done, epochs):
        for x, target in loader:
            if (popdist.getInstanceIndex(), updates) == dies_at and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            _, loss = training(x, target)
            updates += 1
        training.saveCheckpoint(folder, progress=epoch + 1)
    training.destroy()
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dies-at", help="process:update, where a process is killed once")
    given = parser.parse_args()
    rank, _, update = (given.dies_at or "").partition(":")
    loss = train(given.folder, given.epochs, (int(rank), int(update)) if given.dies_at else None)
    if popdist.getInstanceIndex() == 0:
        print(f"started {1 + int(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0'))} time(s), loss {loss:.9f}")


if __name__ == "__main__":
    main()
