"""What capture takes: a call of `forward`. What it gives: the graph of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poptorch.capture.trained import TrainedGroup
from poptorch.ir import StepGraph
from poptorch.ir.structure import Layout


@dataclass(frozen=True)
class Call:
    """How `forward` is called: nested arguments, and an example of one micro-batch for each of their tensors."""

    args: Layout
    kwargs: Layout
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Captured:
    """What capture hands on: the graph of a step, the layout of its result, and the groups it trains."""

    graph: StepGraph
    result: Layout
    groups: tuple[TrainedGroup, ...] = ()
