"""Batch arithmetic: how the rows of one call become micro-batches, and which of their outputs come back.

Pure numbers, no tensors: the plan is computed once and tested by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from poptorch.enums import OutputMode
from poptorch.errors import BatchSizeError, Error, explain


@dataclass(frozen=True)
class BatchPlan:
    """D device iterations of G steps on R replicas; micro-batch `(d * G + g) * R + r` goes to replica r."""

    device_iterations: int
    gradient_accumulation: int
    replicas: int
    output_mode: OutputMode
    output_period: int

    def __post_init__(self) -> None:
        counts = {
            "deviceIterations": self.device_iterations,
            "Training.gradientAccumulation": self.gradient_accumulation,
            "replicationFactor": self.replicas,
        }
        for name, count in counts.items():
            if count < 1:
                raise Error(explain(f"{name} is {count}, but it counts something and must be at least 1."))
        if self.output_mode is OutputMode.EveryN:
            d, n = self.device_iterations, self.output_period
            if n < 1 or n > d or d % n:
                raise Error(
                    explain(
                        f"outputMode EveryN returns every {n}th device iteration, "
                        f"but there are {d} of them and {d} is not a multiple of {n}.",
                        fix="choose a period that divides deviceIterations",
                    )
                )

    @property
    def micro_batches(self) -> int:
        """How many micro-batches one call consumes."""
        return self.device_iterations * self.gradient_accumulation * self.replicas

    @property
    def micro_batches_per_update(self) -> int:
        return self.gradient_accumulation * self.replicas

    @property
    def kept(self) -> tuple[int, ...]:
        """The micro-batches whose outputs are returned, in order; for `Sum` those that are added up are all of them."""
        d, per_update = self.device_iterations, self.micro_batches_per_update
        if self.output_mode is OutputMode.All or self.output_mode is OutputMode.Sum:
            return tuple(range(self.micro_batches))
        if self.output_mode is OutputMode.EveryN:
            chosen = range(self.output_period - 1, d, self.output_period)
            return tuple(i * per_update + k for i in chosen for k in range(per_update))
        return tuple(range(self.micro_batches - self.replicas, self.micro_batches))

    @property
    def output_copies(self) -> int:
        """How many copies of an output one call returns, concatenated along its first dimension."""
        return self.replicas if self.output_mode is OutputMode.Sum else len(self.kept)

    def rows_per_micro_batch(self, name: str, shape: tuple[int, ...]) -> int:
        """The rows of one micro-batch for a host tensor of this shape, which must divide evenly."""
        rows, parts = (shape[0] if shape else 1), self.micro_batches
        if rows % parts:
            raise BatchSizeError(
                explain(
                    f"argument {name} has shape {list(shape)}: {rows} rows do not split into {parts} micro-batches.",
                    arithmetic=(
                        f"deviceIterations {self.device_iterations} × replicationFactor {self.replicas} × "
                        f"gradientAccumulation {self.gradient_accumulation} = {parts} micro-batches; "
                        f"{rows} / {parts} = {rows / parts:g} rows"
                    ),
                    fix=f"pass a multiple of {parts} rows, or change these options",
                )
            )
        return rows // parts
