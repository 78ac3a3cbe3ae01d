"""Train in several processes, and go on after a failure from the last checkpoint.

    poprun --num-instances 2 --max-restarts 2 examples/resume.py --folder checkpoints --dies-at 1:5

Process 1 is killed at update 5. torchrun then starts all processes again; they load what process 0 has written last,
and end with the loss that they would have had without the accident.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import distributed, nn

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


class Checkpoints:
    """One file that is whole at any time, written by process 0 with the random numbers of all."""

    def __init__(self, folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._module, self._optimizer = folder / "last.pt", module, optimizer

    def save(self, epoch: int, numbers: list[int] | None) -> None:
        streams: list[list[int] | None] = [numbers] * popdist.getNumInstances()
        if popdist.getNumInstances() > 1:
            distributed.all_gather_object(streams, numbers)
        if popdist.getInstanceIndex() == 0:
            state = {"epoch": epoch, "streams": streams, "module": self._module.state_dict()}
            unfinished = self._file.with_suffix(".unfinished")
            torch.save({**state, "optimizer": self._optimizer.state_dict()}, unfinished)
            os.replace(unfinished, self._file)  # either the old one is there or the new one

    def load(self) -> tuple[int, list[int] | None]:
        """The epochs that are done, and the random numbers of this process; both are nothing at the start."""
        if not self._file.exists():
            return 0, None
        state = torch.load(self._file)
        self._module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        return state["epoch"], state["streams"][popdist.getInstanceIndex()]


def train(folder: Path, epochs: int, dies_at: tuple[int, int] | None = None) -> float:
    """The loss of process 0 in the last update."""
    popdist.init()
    options = popdist.poptorch.Options().randomSeed(0)
    torch.manual_seed(0)
    module = Model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    checkpoints = Checkpoints(folder, module, optimizer)
    done, numbers = checkpoints.load()
    training = poptorch.trainingModel(module, options, optimizer)
    loader = poptorch.DataLoader(options, data(), batch_size=32, drop_last=True)
    updates, loss = done * len(loader), torch.zeros(())
    for epoch in range(done, epochs):
        for x, target in loader:
            if (popdist.getInstanceIndex(), updates) == dies_at and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            if numbers is not None and not training.isCompiled():
                training.compile(x, target)
                training.rng_state = numbers
            _, loss = training(x, target)
            updates += 1
        checkpoints.save(epoch + 1, training.rng_state)
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
