"""What the host may change between two calls of a program, as values that can be compared with earlier ones."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import nn

from poptorch.lightning.options import Clipping

_requires_grad, _mode, _version = attrgetter("requires_grad"), attrgetter("training"), attrgetter("_version")


class HostWatch:
    """Looks at a module, its optimiser and its Trainer; every call asks, so lists are made once."""

    def __init__(self, module: nn.Module, trainer: Any) -> None:
        self._trainer = trainer
        self.names = [name for name, _ in module.named_parameters()]
        self._parameters, self._modules = list(module.parameters()), list(module.modules())
        self._tensors = [*self._parameters, *module.buffers()]

    def clipping(self) -> Clipping:
        """The limit on gradients that the Trainer has now."""
        algorithm = self._trainer.gradient_clip_algorithm
        name = "norm" if algorithm is None else str(getattr(algorithm, "value", algorithm))
        return Clipping(self._trainer.gradient_clip_val, name)

    def shape_of_training(self, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
        """What a training program is made for: the trained parameters, the modes of the submodules, the clipping."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        return sizes, list(map(_requires_grad, self._parameters)), list(map(_mode, self._modules)), self.clipping()

    def versions(self) -> list[int]:
        """How often each parameter and buffer was written to by the host."""
        return list(map(_version, self._tensors))


def numbers_of(optimizer: Any) -> list[Any]:
    """Everything about an optimiser that a program takes as numbers."""
    numbers: list[Any] = [getattr(optimizer, "loss_scaling", None)]
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                numbers.append(float(value) if isinstance(value, torch.Tensor) else value)
    return numbers
