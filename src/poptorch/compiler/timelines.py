"""In which order IPUs work: pipelined, sharded, in phases.

Each function gives the tasks of one update of one replica. Sections are those of `forward`; in training each has a
backward part on the same IPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from poptorch.compiler.sections import Sections
from poptorch.executable.timeline import Kind, Task, Timeline
from poptorch.options import Mode, Settings

Work = tuple[Kind, int, int]  # what is done, in which section, for which micro-batch


@dataclass(frozen=True)
class Plan:
    """What a timeline is made for."""

    ipus: tuple[int, ...]  # of each section
    micro_batches: int
    training: bool
    recomputes: bool = False

    @property
    def sections(self) -> range:
        return range(len(self.ipus))

    def backward(self, section: int, micro_batch: int) -> Iterator[Work]:
        """The backward part of a section. The last section keeps what it needs: its backward part follows at once."""
        if self.recomputes and section != self.sections[-1]:
            yield Kind.RECOMPUTE, section, micro_batch
        yield Kind.BACKWARD, section, micro_batch


def plan_timeline(sections: Sections, settings: Settings, *, recomputes: bool) -> Timeline:
    """The timeline that the options ask for."""
    mode, batching = settings.placement.strategy.mode, settings.batching
    fills_pipeline = mode is Mode.PIPELINED and not settings.is_training
    micro_batches = batching.device_iterations if fills_pipeline else batching.gradient_accumulation
    ipus = tuple(placement.ipu for placement in sections.placements)
    plan = Plan(ipus, micro_batches, settings.is_training, recomputes)
    if mode is Mode.PIPELINED:
        return pipelined(plan)
    if mode is Mode.SHARDED:
        return sharded(plan)
    return phased(plan, [placement.phase for placement in sections.placements])


def pipelined(plan: Plan) -> Timeline:
    """Sections work at the same time on different micro-batches; one forward and one backward part in turns.

    In cycle c stage s works on micro-batch c - s. Stages are the sections, then in training the backward parts in
    reverse order; the last forward part and the first backward part are one stage.
    """
    last = plan.sections[-1]
    stages = 2 * last + 1 if plan.training else last + 1
    cycles: list[list[Work]] = []
    for cycle in range(plan.micro_batches + stages - 1):
        works: list[Work] = []
        for section in plan.sections:
            if 0 <= cycle - section < plan.micro_batches:
                works.append((Kind.FORWARD, section, cycle - section))
        for section in reversed(plan.sections) if plan.training else ():
            micro_batch = cycle - (2 * last - section)
            if 0 <= micro_batch < plan.micro_batches:
                works += plan.backward(section, micro_batch)
        cycles.append(works)
    return _timeline(plan, cycles)


def sharded(plan: Plan) -> Timeline:
    """One section at a time, and one micro-batch after the other, forward and backward."""
    cycles: list[list[Work]] = []
    for micro_batch in range(plan.micro_batches):
        cycles += [[(Kind.FORWARD, section, micro_batch)] for section in plan.sections]
        for section in reversed(plan.sections) if plan.training else ():
            cycles += [[work] for work in plan.backward(section, micro_batch)]
    return _timeline(plan, cycles)


def phased(plan: Plan, phases: Sequence[int]) -> Timeline:
    """One phase after the other, each for all micro-batches, so that its weights are fetched once.

    Sections of one phase run at the same time where they are on different IPUs and do not wait for each other.
    """
    order = sorted(set(phases))
    groups = [[section for section in plan.sections if phases[section] == phase] for phase in order]
    cycles: list[list[Work]] = []
    for group in groups:
        cycles += _waves(plan, group, _forward)
    for group in reversed(groups) if plan.training else ():
        cycles += _waves(plan, group[::-1], plan.backward)
    return _timeline(plan, cycles)


def _forward(section: int, micro_batch: int) -> list[Work]:
    return [(Kind.FORWARD, section, micro_batch)]


def _waves(plan: Plan, group: Sequence[int], parts: Callable[[int, int], Iterable[Work]]) -> Iterator[list[Work]]:
    """The sections of a phase as a short pipeline: each starts on the next micro-batch as soon as it is free."""
    for cycle in range(plan.micro_batches + len(group) - 1):
        works: list[Work] = []
        for position, section in enumerate(group):
            if 0 <= cycle - position < plan.micro_batches:
                works += parts(section, cycle - position)
        yield works


def _timeline(plan: Plan, cycles: Iterable[Sequence[Work]]) -> Timeline:
    """Give all work its slots: what an IPU does in one cycle follows one by one, and the next cycle waits for all."""
    tasks: list[Task] = []
    start = 0
    for works in cycles:
        busy: dict[int, int] = {}
        for kind, section, micro_batch in works:
            ipu = plan.ipus[section]
            slot = start + busy.get(ipu, 0)
            busy[ipu] = busy.get(ipu, 0) + 1
            tasks.append(Task(kind, section, micro_batch, ipu, slot))
        start += max(busy.values(), default=0)
    if plan.training:
        tasks += _updates(plan, start)
    return Timeline(tuple(tasks), len(plan.ipus), plan.micro_batches)


def _updates(plan: Plan, slot: int) -> Iterator[Task]:
    """Every IPU updates its own weights, when all have finished."""
    first = {ipu: section for section, ipu in reversed(list(enumerate(plan.ipus)))}
    for ipu in sorted(first):
        yield Task(Kind.UPDATE, first[ipu], 0, ipu, slot)
