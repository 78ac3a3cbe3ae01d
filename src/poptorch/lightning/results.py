"""From the copies that a call returns, one per micro-batch, to the one value that Lightning expects of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import poptorch

_NARROWED = {torch.int64: torch.int32, torch.float64: torch.float32}  # what a device has no type for
_BUILT_INS: dict[Any, str] = {sum: "sum", min: "min", max: "max"}


@dataclass(frozen=True)
class Batching:
    """How many micro-batches one call takes, and which of them return something."""

    device_iterations: int
    gradient_accumulation: int
    replicas: int
    mode: poptorch.OutputMode

    @classmethod
    def of(cls, options: poptorch.Options, *, training: bool) -> Batching:
        accumulation = options.Training.gradient_accumulation if training else 1
        mode = options.output_mode
        if options.defaultOutputMode():
            mode = poptorch.OutputMode.Final if training else poptorch.OutputMode.All
        return cls(options.device_iterations, accumulation, options.replication_factor, mode)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a call takes."""
        return self.device_iterations * self.gradient_accumulation * self.replicas

    @property
    def summed(self) -> int:
        """How many micro-batches are added up in one returned copy."""
        is_sum = self.mode is poptorch.OutputMode.Sum
        return self.device_iterations * self.gradient_accumulation if is_sum else 1

    @property
    def returns_all(self) -> bool:
        """Whether every micro-batch returns its results by itself."""
        return self.mode is poptorch.OutputMode.All or self.micro_batches == 1


@dataclass(frozen=True)
class Output:
    """One output of the compiled step, as the user's code computed it for one micro-batch."""

    dtype: torch.dtype
    is_number: bool  # without dimensions

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Output:
        return cls(tensor.dtype, tensor.dim() == 0)

    def widened(self, copies: torch.Tensor) -> torch.Tensor:
        """What came back, in the type that the user's code computed."""
        return copies.to(self.dtype) if self.dtype in _NARROWED else copies


def narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in a type that devices have; `Output.widened` undoes it."""
    return tensor.to(_NARROWED.get(tensor.dtype, tensor.dtype))


def combined(copies: torch.Tensor, output: Output, batching: Batching) -> torch.Tensor:
    """A result of a step for the whole batch: the mean of numbers; rows stay as they are."""
    if not (output.is_number and output.dtype.is_floating_point):
        return copies
    return reduced(copies, "mean", batching)


def reduced(copies: torch.Tensor, reduction: str, batching: Batching) -> torch.Tensor:
    """One number for the whole batch, from one per micro-batch; a single copy stands for all."""
    if reduction == "sum":
        number = _plain(copies).sum()
        stands_for_all = copies.dim() == 0 and batching.returns_all
        return number * batching.micro_batches if stands_for_all else number
    if reduction == "mean":
        mean = _plain(copies).mean() if copies.dim() else _plain(copies)
        return mean if batching.summed == 1 else mean / batching.summed
    return {"min": torch.min, "max": torch.max}[reduction](_plain(copies))


def reduction_name(reduce_fx: str | Callable[..., Any]) -> str | None:
    """Which of the reductions an argument of `self.log` names; None if Lightning will refuse it."""
    name = reduce_fx.lower() if isinstance(reduce_fx, str) else _BUILT_INS.get(reduce_fx)
    for known in ("mean", "sum", "min", "max"):
        if name == known or reduce_fx is getattr(torch, known):
            return known
    return "mean" if name == "avg" else None


def _plain(copies: torch.Tensor) -> torch.Tensor:
    """Numbers that can be averaged without losing digits: half precision and integers become float32."""
    return copies if copies.dtype in (torch.float32, torch.float64) else copies.float()
