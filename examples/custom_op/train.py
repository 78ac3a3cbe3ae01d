"""Train and run a model with an operation that is written in C++: `cube.cpp` beside this file.

`python examples/custom_op/train.py` builds the operation, loads the library, and uses it in training and inference.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from pathlib import Path

import torch
from build import build

import poptorch


class Model(torch.nn.Module):
    """A classifier with a cube in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(100, 100), torch.nn.Linear(100, 100)
        self.bias = torch.nn.Parameter(torch.zeros(100))

    def forward(self, x: torch.Tensor, label: torch.Tensor | None = None):
        hidden = self.before(x)
        # Two outputs, like x in shape and type: x^3 + bias, and x^3. Only the first is used here.
        hidden, _ = poptorch.custom_op([hidden, self.bias], "Cube", "com.acme", 1, example_outputs=[x, x])
        scores = self.after(hidden)
        return scores if label is None else (scores, torch.nn.functional.cross_entropy(scores, label))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--engine", choices=["inductor", "eager"], default="inductor")
    arguments.add_argument("--library", type=Path, help="one that was built before, instead of building it again")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = chosen.library or build(Path(folder))
        ctypes.cdll.LoadLibrary(str(library.resolve()))  # from here on, the operation is known

    torch.manual_seed(0)
    options = poptorch.Options().engine(chosen.engine)
    model = Model()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.01))
    x, label = torch.rand(1, 100), torch.tensor([42])
    for step in range(1, 101):
        _, loss = training(x, label)
        if step in (1, 10, 100):
            print(f"step {step:3}: loss {loss.item():.4f}")
    scores = poptorch.inferenceModel(model, options)(x)
    print(f"class {scores.argmax().item()}, probability {scores.softmax(-1).max().item():.2f}")


if __name__ == "__main__":
    main()
