"""Train a small convolutional classifier on 8×8 images of handwritten digits, on the emulated IPU.

The same model is trained by an ordinary PyTorch loop in the same run, epoch by epoch in turns, to compare the speed.
Run it with `make demo`, or with `python examples/digits.py --epochs 5 --engine eager`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import poptorch

BATCH_SIZE = 16  # rows that one forward pass sees
STEPS_PER_CALL = 8  # weight updates that one call of the compiled model does
VALIDATION_SIZE = 357


class Classifier(nn.Module):
    """Two convolutions and a linear layer; returns the loss too when it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images, labels=None):
        scores = self.head(self.features(images))
        if labels is None:
            return scores
        return scores, F.cross_entropy(scores, labels)


Rows = tuple[torch.Tensor, torch.Tensor]


def load() -> tuple[Rows, Rows]:
    """The images and labels to train on, and those to validate with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, validation = order[VALIDATION_SIZE:], order[:VALIDATION_SIZE]
    return (images[train], labels[train]), (images[validation], labels[validation])


def batches(rows: Rows, size: int, epoch: int) -> Iterator[Rows]:
    """The rows in a new order each epoch, in batches of equal size; what is left over waits for another epoch."""
    images, labels = rows
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    for chosen in order[: len(order) // size * size].split(size):
        yield images[chosen], labels[chosen]


def train_compiled(training: poptorch.PoplarExecutor, rows: Rows, epoch: int) -> float:
    """One epoch on the emulated IPU: a call takes several batches and does as many weight updates."""
    losses = []
    for images, labels in batches(rows, BATCH_SIZE * STEPS_PER_CALL, epoch):
        _, loss = training(images, labels)
        losses.append(loss)
    return torch.cat(losses).mean().item()


def train_eager(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Rows, epoch: int) -> float:
    """The same epoch, on the same batches, as a loop in plain PyTorch."""
    losses = []
    for images, labels in batches(rows, BATCH_SIZE * STEPS_PER_CALL, epoch):
        for micro_images, micro_labels in zip(images.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True):
            optimizer.zero_grad()
            _, loss = model(micro_images, micro_labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def timed(function: Callable[..., float], *arguments: object) -> tuple[float, float]:
    """What a function returns, and how many seconds it took."""
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--engine", choices=("inductor", "eager"), help="default: inductor if there is a C++ compiler")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    train_rows, (images, labels) = load()
    samples = len(train_rows[1]) // (BATCH_SIZE * STEPS_PER_CALL) * BATCH_SIZE * STEPS_PER_CALL

    model = Classifier()
    reference = copy.deepcopy(model)
    reference_optimizer = new_optimizer(reference)

    options = poptorch.Options().deviceIterations(STEPS_PER_CALL).outputMode(poptorch.OutputMode.All)
    validation_options = poptorch.Options()
    if arguments.engine:
        options.engine(arguments.engine)
        validation_options.engine(arguments.engine)
    training = poptorch.trainingModel(model, options, new_optimizer(model))
    validation = poptorch.inferenceModel(model, validation_options)

    print(f"Handwritten digits: {len(train_rows[1])} images to train on, {len(labels)} to validate with.")
    print("Compiling the whole training step (forward, backward, update) ...", end=" ", flush=True)
    start = time.perf_counter()
    training.compile(*next(batches(train_rows, BATCH_SIZE * STEPS_PER_CALL, epoch=0)))
    print(f"done in {time.perf_counter() - start:.1f} s.\n")

    print("epoch     loss   emulated IPU    eager PyTorch")
    compiled_seconds, eager_seconds = [], []
    for epoch in range(1, arguments.epochs + 1):
        loss, compiled = timed(train_compiled, training, train_rows, epoch)
        _, eager = timed(train_eager, reference, reference_optimizer, train_rows, epoch)
        compiled_seconds.append(compiled)
        eager_seconds.append(eager)
        print(f"{epoch:5}  {loss:7.4f}  {samples / compiled:7.0f} img/s   {samples / eager:8.0f} img/s")

    accuracy = (validation(images).argmax(1) == labels).float().mean().item()
    with torch.no_grad():
        reference_accuracy = (reference(images).argmax(1) == labels).float().mean().item()
    speed = samples / statistics.median(compiled_seconds)
    ratio = statistics.median(eager_seconds) / statistics.median(compiled_seconds)
    print(f"\nAccuracy on images it has never seen: {accuracy:.1%} (eager PyTorch: {reference_accuracy:.1%})")
    print(
        f"Training speed: {speed:.0f} images/s, {ratio:.1f} times eager PyTorch (medians of {arguments.epochs} epochs)"
    )


if __name__ == "__main__":
    main()
