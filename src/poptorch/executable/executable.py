"""The finished program of a model as a frozen value: what runs, how often, and what comes in and out."""

from __future__ import annotations

from dataclasses import dataclass

from poptorch.executable.checks import IndexCheck
from poptorch.executable.program import Program
from poptorch.ir import InputSpec, OutputSpec
from poptorch.ir.structure import Layout


@dataclass(frozen=True)
class Batching:
    """How one call is cut into micro-batches, and which outputs it returns."""

    device_iterations: int
    micro_batches_per_update: int
    replicas: int
    sources: tuple[int, ...]  # for each micro-batch, the part of the call's rows that it is fed
    kept: tuple[int, ...]
    sums: bool

    @property
    def micro_batches(self) -> int:
        return self.device_iterations * self.micro_batches_per_update

    @property
    def input_batches(self) -> int:
        """Into how many parts the rows of a call are cut."""
        return max(self.sources) + 1


@dataclass(frozen=True)
class AnchorPlan:
    """A tensor that every call collects beside the outputs.

    `state` names it if it is state that the step leaves behind; otherwise the step returns it under `name`.
    """

    name: str
    state: str | None
    kept: frozenset[int]
    sums: bool


@dataclass(frozen=True)
class Grouping:
    """A parameter that has one entry per group of replicas, in a first dimension that programs do not see."""

    name: str
    of_replicas: tuple[int, ...]  # the group of each replica

    @property
    def groups(self) -> int:
        return max(self.of_replicas) + 1


@dataclass(frozen=True)
class Executable:
    """What one call runs: `step` for every micro-batch and, if it is not part of the step, `update` after each group.

    `prepare` computes the DERIVED state of an inference step; it runs whenever weights are taken over.
    """

    step: Program
    update: Program | None
    prepare: Program | None
    batching: Batching
    result: Layout
    checks: tuple[IndexCheck, ...]
    random_seed: int | None
    anchors: tuple[AnchorPlan, ...] = ()
    groupings: tuple[Grouping, ...] = ()
    tensor_names: tuple[str, ...] = ()  # what anchors can be asked for

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(program for program in (self.step, self.update, self.prepare) if program is not None)

    @property
    def state(self) -> tuple[InputSpec, ...]:
        """Every state input of any program, once."""
        return tuple({spec.name: spec for program in self.programs for spec in program.state}.values())

    @property
    def outputs(self) -> tuple[OutputSpec, ...]:
        """What the step returns: the user's outputs, then anchors and guards if there are any."""
        return self.step.returned

    def __str__(self) -> str:
        return "\n\n".join(str(program.graph) for program in self.programs)
