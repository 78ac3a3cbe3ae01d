"""The finished program of a model as a frozen value: what runs, how often, and what comes in and out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poptorch.executable.checks import IndexCheck
from poptorch.executable.data import plain, tensors_in
from poptorch.executable.interface import Interface
from poptorch.executable.program import Program
from poptorch.executable.schedule import Schedule
from poptorch.executable.share import Share
from poptorch.executable.state import StateBinding
from poptorch.executable.timeline import Timeline
from poptorch.ir import Guard, InputSpec, OutputSpec, Role
from poptorch.ir.digest import digest
from poptorch.ir.ops import is_view
from poptorch.ir.serial import FormatError

_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten.lift_fresh_copy.default})


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
class Executable:
    """What one call runs: programs, in the order of the schedule.

    `prepare`, if there is one, computes the DERIVED state of an inference step when weights are taken over.
    """

    programs: tuple[Program, ...]
    schedule: Schedule
    binding: StateBinding
    batching: Batching
    interface: Interface
    checks: tuple[IndexCheck, ...] = ()
    anchors: tuple[AnchorPlan, ...] = ()
    tensor_names: tuple[str, ...] = ()  # what anchors can be asked for
    random_seed: int | None = None
    outputs: tuple[OutputSpec, ...] = ()  # of a micro-batch: the user's, then anchors and guards if there are any
    timeline: Timeline | None = None  # what the IPUs of a replica would do; the schedule is what is run here
    share: Share | None = None  # if other processes have programs for other stages
    common: str = ""  # the digest of what all processes run together, if each has programs of its own

    def program(self, name: str) -> Program:
        return next(program for program in self.programs if program.name == name)

    @property
    def step(self) -> Program:
        """What runs for every micro-batch, if that is one program."""
        return self.program(self.schedule.runs[0].program)

    @property
    def steps(self) -> tuple[Program, ...]:
        """What runs for every micro-batch, in order: one program, or the parts that it was cut into."""
        return tuple(map(self.program, dict.fromkeys(run.program for run in self.schedule.runs)))

    @property
    def user_inputs(self) -> tuple[str, ...]:
        """The names of the inputs that take the tensors of a call, in their order."""
        return self.interface.inputs

    @property
    def ipus(self) -> int:
        """How many IPUs all replicas take together, in this process; none for a model that computes nothing."""
        if self.share is not None:
            return self.share.ipus * self.batching.replicas
        if not self.computes:
            return 0
        return (1 if self.timeline is None else 1 + max(self.timeline.ipus)) * self.batching.replicas

    @property
    def computes(self) -> bool:
        """Whether there is more to do than to hand inputs and constants through."""
        return any(_computes(program) for program in self.programs)

    @property
    def written_by_steps(self) -> frozenset[str]:
        """The state that every micro-batch changes."""
        return frozenset(name for program in self.steps for name in program.written_state)

    @property
    def trains(self) -> bool:
        """Whether a call changes parameters."""
        written = {name for program in self.programs for name in program.written_state}
        return any(spec.role is Role.PARAMETER and spec.name in written for spec in self.state)

    @property
    def is_cut(self) -> bool:
        """Whether micro-batches go through several programs, here or in other processes."""
        return len(self.steps) > 1 or self.share is not None

    @property
    def update(self) -> Program | None:
        """What runs once per update, if that is not part of the step."""
        return next((program for program in self.programs if program.name == "update"), None)

    @property
    def prepare(self) -> Program | None:
        return next((program for program in self.programs if program.name == "prepare"), None)

    @property
    def guards(self) -> tuple[Guard, ...]:
        if self.share is not None:
            return self.share.guards
        return next((program.guards for program in self.steps if program.guards), ())

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The values of CONSTANT inputs of any program."""
        return {name: value for program in self.programs for name, value in program.constants.items()}

    @property
    def state(self) -> tuple[InputSpec, ...]:
        """Every state input of any program, once."""
        return self.binding.inputs

    @property
    def changes_state(self) -> bool:
        """Whether a call changes tensors that outlive it."""
        return any(program.written_state for program in self.programs)

    @property
    def digest(self) -> str:
        """A name for what the executable does: the same in every process, wherever the model was written."""
        return digest(plain(self), tensors_in(self))

    @property
    def common_digest(self) -> str:
        """The digest of what all processes run together; empty if it draws from a generator of the user."""
        if self.common:
            return self.common
        try:
            return self.digest
        except FormatError:
            return ""

    def __str__(self) -> str:
        call = f"call{self.interface.arguments}"
        timeline = [self.timeline] if self.timeline is not None and self.timeline.sections > 1 else []
        graphs = [program.graph for program in self.programs]
        return "\n\n".join(map(str, [call, *timeline, self.schedule, self.binding, *graphs]))


def _computes(program: Program) -> bool:
    """Whether a program does more than copy inputs and make constants."""
    ops = [node for node in program.graph.ops.nodes if node.op == "call_function"]
    found = (node for node in ops if node.all_input_nodes and not is_view(node) and node.target not in _COPIES)
    return program.draws_random_numbers or any(found)
