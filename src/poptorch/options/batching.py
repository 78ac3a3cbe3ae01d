"""Batch arithmetic: how the rows of one call become micro-batches, and which of their outputs come back.

Pure numbers, no tensors: the plan is computed once and tested by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from poptorch.enums import CommGroupType, OutputMode
from poptorch.errors import BatchSizeError, Error, explain


@dataclass(frozen=True)
class BatchPlan:
    """D device iterations of G steps on R replicas; micro-batch `(d * G + g) * R + r` goes to replica r.

    Replicas of one input group are fed the same rows, so a call brings fewer batches than micro-batches run.
    """

    device_iterations: int
    gradient_accumulation: int
    replicas: int
    output_mode: OutputMode
    output_period: int
    input_group_size: int = 1
    input_group_type: CommGroupType = CommGroupType.Consecutive

    def __post_init__(self) -> None:
        counts = {
            "deviceIterations": self.device_iterations,
            "Training.gradientAccumulation": self.gradient_accumulation,
            "replicationFactor": self.replicas,
        }
        for name, count in counts.items():
            if count < 1:
                raise Error(explain(f"{name} is {count}, but it counts something and must be at least 1."))
        if self.input_group_size < 1 or self.replicas % self.input_group_size:
            raise Error(
                explain(
                    f"inputReplicaGrouping has groups of {self.input_group_size}, which do not divide "
                    f"{self.replicas} replicas.",
                    fix="call replicationFactor before inputReplicaGrouping, and choose a size that divides it",
                )
            )
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
        """How many micro-batches one call runs."""
        return self.device_iterations * self.gradient_accumulation * self.replicas

    @property
    def input_groups(self) -> int:
        """How many groups of replicas there are, each with rows of its own."""
        return self.replicas // self.input_group_size

    @property
    def input_batches(self) -> int:
        """Into how many parts the rows of a call are cut."""
        return self.device_iterations * self.gradient_accumulation * self.input_groups

    @property
    def sources(self) -> tuple[int, ...]:
        """For each micro-batch the part of the rows that it is fed."""
        consecutive = self.input_group_type is CommGroupType.Consecutive
        groups = [r // self.input_group_size if consecutive else r % self.input_groups for r in range(self.replicas)]
        steps = range(self.device_iterations * self.gradient_accumulation)
        return tuple(step * self.input_groups + group for step in steps for group in groups)

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
        rows, parts = (shape[0] if shape else 1), self.input_batches
        if rows % parts:
            grouped = f" / inputReplicaGrouping {self.input_group_size}" if self.input_group_size > 1 else ""
            raise BatchSizeError(
                explain(
                    f"Invalid batch dimension: argument {name} has shape {list(shape)}, "
                    f"but {rows} rows do not split into {parts} micro-batches.",
                    arithmetic=(
                        f"deviceIterations {self.device_iterations} × replicationFactor {self.replicas}{grouped} × "
                        f"gradientAccumulation {self.gradient_accumulation} = {parts} micro-batches; "
                        f"{rows} / {parts} = {rows / parts:g} rows"
                    ),
                    fix=f"pass a multiple of {parts} rows, or change these options",
                )
            )
        return rows // parts
