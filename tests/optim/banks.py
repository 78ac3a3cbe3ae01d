"""Models for the tests of optimisers: many tiny parameters, or one whose gradient is the input."""

from __future__ import annotations

import torch
from torch import nn

import poptorch


class Bank(nn.Module):
    """One matrix and one vector for each of `count` parameter groups; every one of them matters for the loss."""

    def __init__(self, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrices = nn.ParameterList([torch.randn(2, 3, generator=generator) for _ in range(count)])
        self.vectors = nn.ParameterList([torch.randn(2, generator=generator) for _ in range(count)])

    def forward(self, x, target):
        y = torch.tanh(x @ torch.cat(list(self.matrices)).T + torch.cat(list(self.vectors)))
        return y, torch.nn.functional.mse_loss(y, target[:, None].expand_as(y), reduction="sum")

    def groups(self, settings, *, only_matrices=False):
        tensors = zip(self.matrices, self.vectors, settings, strict=True)
        return [
            {"params": [matrix] if only_matrices else [matrix, vector], **flags} for matrix, vector, flags in tensors
        ]


class Given(nn.Module):
    """The gradient of `w` is the row that the model is called with."""

    def __init__(self, values=(0.5, -1.5, 2.0), dtype=torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=dtype))

    def forward(self, gradient):
        return poptorch.identity_loss((self.w * gradient[0]).sum(), reduction="sum")


def options(*, accumulation: int = 1, replicas: int = 1, sums: bool = False, engine: str = "eager"):
    made = poptorch.Options().engine(engine).replicationFactor(replicas)
    made.Training.gradientAccumulation(accumulation)
    if sums:
        made.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    return made
