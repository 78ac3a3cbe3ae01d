"""What the IPUs of one replica do in one update, as a table: a row for each IPU, a column for each slot of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a task does with its section of the model; the value is how tables show it."""

    FORWARD = "F"
    RECOMPUTE = "R"  # the activations of a section once more, for its backward pass
    BACKWARD = "B"
    UPDATE = "U"


Part = tuple[Kind, int]  # what is done, in which section


def part_name(part: Part) -> str:
    """What the program of a part is called."""
    return f"{part[0].name.lower()}{part[1]}"


@dataclass(frozen=True)
class Task:
    """One thing that an IPU does: a section of the model on a micro-batch, or the update of its weights."""

    kind: Kind
    section: int
    micro_batch: int  # 0 for updates, which belong to all
    ipu: int
    slot: int

    def __str__(self) -> str:
        return "U" if self.kind is Kind.UPDATE else f"{self.kind.value}{self.section}.{self.micro_batch}"


@dataclass(frozen=True)
class Timeline:
    """All tasks of one update (of one call, for inference), in an order in which they could run one by one."""

    tasks: tuple[Task, ...]
    sections: int
    micro_batches: int

    def __post_init__(self) -> None:
        self._verify()

    @property
    def slots(self) -> int:
        return 1 + max((task.slot for task in self.tasks), default=-1)

    @property
    def ipus(self) -> tuple[int, ...]:
        """The IPUs that have something to do."""
        return tuple(sorted({task.ipu for task in self.tasks}))

    @property
    def bubble_share(self) -> float:
        """Which part of the time IPUs wait, on average."""
        places = len(self.ipus) * self.slots
        return 1 - len(self.tasks) / places if places else 0.0

    def peak_stash(self, section: int) -> int:
        """How many micro-batches wait at once for the backward pass of a section, with what it needs in memory."""
        ends = {task.micro_batch: task.slot for task in self._of(Kind.BACKWARD, section)}
        begins = {task.micro_batch: task.slot for task in self._of(Kind.FORWARD, section)}
        waiting = [sum(begins[m] <= slot <= ends[m] for m in ends) for slot in range(self.slots)]
        return max(waiting, default=0)

    def _of(self, kind: Kind, section: int) -> Iterator[Task]:
        return (task for task in self.tasks if task.kind is kind and task.section == section)

    def _verify(self) -> None:
        """Check what every timeline keeps; a failure is a mistake of ours, not of the user."""
        places = [(task.ipu, task.slot) for task in self.tasks]
        assert len(set(places)) == len(places), "an IPU does one thing at a time"
        done: dict[tuple[Kind, int, int], int] = {}
        for task in self.tasks:
            for needed in self._needs(task):
                assert done[needed] < task.slot, f"{task} runs before what it needs"
            key = (task.kind, task.section, task.micro_batch)
            assert key not in done, f"{task} runs twice"
            done[key] = task.slot
        forwards = sum(task.kind is Kind.FORWARD for task in self.tasks)
        assert forwards == self.sections * self.micro_batches, "every micro-batch visits every section"

    def _needs(self, task: Task) -> Iterator[tuple[Kind, int, int]]:
        """The tasks that must be over before this one begins."""
        section, micro_batch = task.section, task.micro_batch
        if task.kind is Kind.FORWARD and section:
            yield Kind.FORWARD, section - 1, micro_batch
        if task.kind in (Kind.RECOMPUTE, Kind.BACKWARD):
            yield Kind.FORWARD, section, micro_batch
            if section + 1 < self.sections:
                yield Kind.BACKWARD, section + 1, micro_batch
        if task.kind is Kind.UPDATE:
            for each in range(self.micro_batches):
                yield Kind.BACKWARD, section, each

    def __str__(self) -> str:
        return "\n".join(_print(self))


def _print(timeline: Timeline) -> Iterator[str]:
    cells = {(task.ipu, task.slot): str(task) for task in timeline.tasks}
    width = max((len(cell) for cell in cells.values()), default=1)
    share = f"{timeline.bubble_share:.0%} of the time waiting"
    yield f"timeline, {timeline.sections} sections, {timeline.micro_batches} micro-batches, {share}:"
    for ipu in timeline.ipus:
        row = " ".join(cells.get((ipu, slot), ".").ljust(width) for slot in range(timeline.slots))
        yield f"  IPU {ipu}  {row}".rstrip()
    stashes = [timeline.peak_stash(section) for section in range(timeline.sections)]
    if any(stashes):
        yield f"  micro-batches kept for the backward pass, by section: {', '.join(map(str, stashes))}"
