"""Lightning: a Trainer on the emulated IPU against one on the CPU, and what a batch costs beyond its program.

Both Trainers run in turns in one process; the first epoch of each, which compiles, does not count.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import poptorch

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class TrainerSpeed:
    """Milliseconds per epoch of the digits with both Trainers, and the median ratio of neighbouring runs."""

    case: str
    cpu_ms: float
    ipu_ms: float
    ratio: float
    goal: float


@dataclass(frozen=True)
class TrainerCost:
    """Microseconds of one batch of a tiny model: the executor alone, and the Trainers with and without `self.log`."""

    executor_us: float
    ipu_us: float
    ipu_logging_us: float
    cpu_us: float
    cpu_logging_us: float


def speed(rounds: int, epochs: int, device_iterations: int = 8) -> TrainerSpeed:
    from examples.lightning_digits import BATCH_SIZE, Clock, Digits, loaders
    from lightning.pytorch import Trainer

    from poptorch.lightning import IPUStrategy

    _silence()

    def epoch_ms(**arguments: Any) -> float:
        clock = Clock()
        trainer = Trainer(max_epochs=epochs + 1, callbacks=[clock], limit_val_batches=0, **QUIET, **arguments)
        trainer.fit(Digits(), loaders()[0])
        return statistics.median(clock.seconds[1:]) * 1e3

    pairs: list[tuple[float, float]] = []
    for _ in range(rounds):
        cpu = epoch_ms(accelerator="cpu")
        strategy = IPUStrategy(device_iterations=device_iterations)
        pairs.append((cpu, epoch_ms(accelerator="ipu", devices=1, strategy=strategy)))
    cpu_ms, ipu_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
    case = f"digits CNN, batch {BATCH_SIZE}, device_iterations={device_iterations}"
    return TrainerSpeed(case, cpu_ms, ipu_ms, statistics.median(cpu / ipu for cpu, ipu in pairs), goal=1.5)


def _silence() -> None:
    """Lightning's remarks about workers and loggers would fill the screen."""
    warnings.filterwarnings("ignore", module=r"lightning|poptorch\.lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


class _Batches:
    """The same small batch again and again."""

    def __init__(self, count: int) -> None:
        self._count, self._batch = count, [torch.randn(4, 8), torch.randn(4, 8)]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Any:
        return iter([self._batch] * self._count)


def costs(batches: int) -> TrainerCost:
    from lightning.pytorch import Callback, LightningModule, Trainer

    import poptorch.lightning  # noqa: F401

    _silence()

    class Tiny(LightningModule):
        def __init__(self, logs: bool) -> None:
            super().__init__()
            self.fc, self.logs = nn.Linear(8, 8), logs

        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.fc(batch[0]), batch[1])
            if self.logs:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Starts(Callback):
        def __init__(self) -> None:
            self.moments: list[float] = []

        def on_train_batch_start(self, *args: Any) -> None:
            self.moments.append(time.perf_counter())

    def batch_us(accelerator: str, logs: bool) -> float:
        starts = Starts()
        trainer = Trainer(accelerator=accelerator, devices=1, max_epochs=1, callbacks=[starts], **QUIET)
        trainer.fit(Tiny(logs), _Batches(batches))
        return _median_us(starts.moments)

    return TrainerCost(
        _executor_us(batches),
        *(batch_us(accelerator, logs) for accelerator in ("ipu", "cpu") for logs in (False, True)),
    )


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, y):
        return F.mse_loss(self.fc(x), y)


def _executor_us(calls: int) -> float:
    model = _Loss()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    moments: list[float] = []
    for batch in _Batches(calls):
        moments.append(time.perf_counter())
        training(*batch)
    training.destroy()
    return _median_us(moments)


def _median_us(moments: list[float]) -> float:
    lengths = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return statistics.median(lengths[len(lengths) // 5 :]) * 1e6  # the first ones compile
