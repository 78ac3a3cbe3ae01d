"""The order in which a call runs its programs, as a value: which IPU runs what, when, on which micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Run:
    """Run a program for one replica on one micro-batch, counted within the round.

    If it `commits`, what it writes is final; otherwise a `Commit` that follows makes it so.
    """

    program: str
    replica: int
    micro_batch: int
    ipu: int  # of the whole system
    slot: int  # of time; what stands in the same slot could run at the same time
    commits: bool = False
    width: int = 1  # micro-batches, from this one on, that the program computes side by side
    replicas: int = 1  # whose micro-batches these are, in turn, from this one on; each replica has an IPU

    def __str__(self) -> str:
        last = self.micro_batch + self.width - 1
        return f"{self.program} {self.micro_batch}" + (f" to {last}" if self.width > 1 else "")


@dataclass(frozen=True)
class Commit:
    """Make final what was written since the last commit, and run these update programs as a part of it."""

    updates: tuple[str, ...]
    ipus: tuple[int, ...]
    slot: int

    def __str__(self) -> str:
        return " ".join(self.updates) or "commit"


@dataclass(frozen=True)
class Reduce:
    """Add up gradient accumulators over all processes, before the commit that uses them.

    If it is `in_order`, the gradients of single micro-batches are added up as one process with all replicas would do
    it: by accumulation step, then by global replica. If it then `averages`, it keeps their running mean. Of those that
    are `scattered` a process gets the sums of the rows that it updates; the others become zero.
    """

    accumulators: tuple[str, ...]
    processes: int
    ipus: tuple[int, ...]
    slot: int
    in_order: bool = False
    averages: bool = False
    scattered: tuple[str, ...] = ()  # some of the accumulators

    def __str__(self) -> str:
        scattered = f", {len(self.scattered)} by rows" if self.scattered else ""
        order = " in order" * self.in_order
        return f"reduce {len(self.accumulators)}{scattered} over {self.processes} processes{order}"


@dataclass(frozen=True)
class Exchange:
    """Run a program for what the update needs to know about the rows of all processes, such as parts of a norm.

    Programs that follow get the vectors of all processes, one below the other, as `result`.
    """

    program: str
    result: str
    processes: int
    ipus: tuple[int, ...]
    slot: int

    def __str__(self) -> str:
        return f"{self.program} of {self.processes} processes"


@dataclass(frozen=True)
class Gather:
    """After a commit: bring together the rows of parameters that processes have updated."""

    parameters: tuple[str, ...]
    processes: int
    ipus: tuple[int, ...]
    slot: int

    def __str__(self) -> str:
        return f"gather {len(self.parameters)} over {self.processes} processes"


@dataclass(frozen=True)
class Meet:
    """Wait until all processes that share the IPUs of a replica are ready for the commit, or learn that one has failed.

    The program, if there is one, computes what updates of other processes need to know.
    """

    program: str | None
    processes: int
    ipus: tuple[int, ...]
    slot: int

    def __str__(self) -> str:
        return f"meet {self.processes} processes"


Instruction = Run | Reduce | Exchange | Meet | Commit | Gather


@dataclass(frozen=True)
class Schedule:
    """What one call does: `rounds` times the same instructions, each time on the next micro-batches."""

    instructions: tuple[Instruction, ...]
    rounds: int
    micro_batches: int  # in a round

    def __post_init__(self) -> None:
        self._verify()

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(instruction for instruction in self.instructions if isinstance(instruction, Run))

    @cached_property
    def reduction(self) -> Reduce | None:
        """What is exchanged with other processes before a commit."""
        return next((step for step in self.instructions if isinstance(step, Reduce)), None)

    @cached_property
    def gathering(self) -> Gather | None:
        """What a commit leaves to be brought together."""
        return next((step for step in self.instructions if isinstance(step, Gather)), None)

    @cached_property
    def width(self) -> int:
        """How many micro-batches each run computes side by side."""
        return self.runs[0].width if self.runs else 1

    @cached_property
    def is_revocable(self) -> bool:
        """Whether something that a run writes can still be taken back: there is a commit to wait for."""
        return any(isinstance(instruction, Commit) for instruction in self.instructions)

    @property
    def ipus(self) -> int:
        return 1 + max((ipu for instruction in self.instructions for ipu in _ipus(instruction)), default=-1)

    @property
    def slots(self) -> int:
        return 1 + max((instruction.slot for instruction in self.instructions), default=-1)

    def _verify(self) -> None:
        """Check what every schedule keeps; a failure is a mistake of ours, not of the user."""
        places = [(ipu, instruction.slot) for instruction in self.instructions for ipu in _ipus(instruction)]
        assert len(set(places)) == len(places), "an IPU does one thing at a time"
        computed = {run.micro_batch + index for run in self.runs for index in range(run.width)}
        assert computed <= set(range(self.micro_batches)), "no such micro-batch"
        assert {run.width for run in self.runs} <= {self.width}, "all runs are equally wide"
        rare = [type(step) for step in self.instructions if not isinstance(step, Run)]
        assert rare == sorted(rare, key=_ORDER.index), "gradients are added up, used, and what is made of them gathered"
        assert len(rare) - rare.count(Exchange) == len({*rare} - {Exchange}), "one reduction and one commit in a round"
        if self.is_revocable:
            assert not isinstance(self.instructions[-1], Run), "a round ends with what makes it final"
            assert not any(run.commits for run in self.runs), "a run commits by itself, or a commit does it for all"

    def __str__(self) -> str:
        return "\n".join(_print(self))


_ORDER = [Reduce, Exchange, Meet, Commit, Gather]  # of what follows the runs of a round


def _ipus(instruction: Instruction) -> tuple[int, ...]:
    if isinstance(instruction, Run):
        return tuple(range(instruction.ipu, instruction.ipu + instruction.replicas))
    return instruction.ipus


def _print(schedule: Schedule) -> Iterator[str]:
    """A row for each IPU, a column for each slot of one round."""
    cells = [[""] * schedule.slots for _ in range(schedule.ipus)]
    for instruction in schedule.instructions:
        for ipu in _ipus(instruction):
            cells[ipu][instruction.slot] = str(instruction)
    times = "once" if schedule.rounds == 1 else f"{schedule.rounds} times"
    yield f"schedule, {times}:"
    titles = [f"slot {slot}" for slot in range(schedule.slots)]
    widths = [max(len(row[slot]) for row in [titles, *cells]) for slot in range(schedule.slots)]
    names = ["", *(f"IPU {ipu}" for ipu in range(schedule.ipus))]
    first = max(map(len, names))
    for name, row in zip(names, [titles, *cells], strict=True):
        columns = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {name:<{first}}  {'  '.join(columns)}".rstrip()
