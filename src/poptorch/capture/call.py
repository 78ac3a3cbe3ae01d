"""What capture takes: a call of `forward`. What it gives: the graph of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poptorch.capture.trained import TrainedGroup
from poptorch.ir import StepGraph
from poptorch.structure import Structure


@dataclass(frozen=True)
class Call:
    """How `forward` is called: nested arguments, and an example of one micro-batch for each of their tensors."""

    args: Structure
    kwargs: Structure
    arguments: tuple[str, ...]  # how users write each tensor, for example `batch[0]`
    tensors: tuple[torch.Tensor, ...]
    taken: frozenset[str] = frozenset()  # names that the model has for something else

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each tensor that nothing else of the model has."""
        return tuple(f"input:{name}" if name in self.taken else name for name in self.arguments)


@dataclass(frozen=True)
class Captured:
    """What capture hands on: the graph of a step and the structure of its result; of training also what is trained."""

    graph: StepGraph
    result: Structure
    groups: tuple[TrainedGroup, ...] = ()
    loss_type: torch.dtype = torch.float32
    reached: frozenset[str] = frozenset()  # the parameters that the loss has a gradient for, trained or not
