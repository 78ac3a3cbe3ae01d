"""Decide in which order a call runs its programs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from poptorch.executable import Commit, Instruction, Kind, Part, Reduce, Run, Schedule, Timeline, part_name
from poptorch.options import BatchPlan, ProcessSettings


def plan_schedule(
    step: str, updates: tuple[str, ...], plan: BatchPlan, *, waits: bool, is_wide: bool = False, ipus: int = 1
) -> Schedule:
    """One round per device iteration: the step for every micro-batch of an update, then the updates.

    If it `waits`, nothing that a step writes is final before all steps of the round have succeeded. A wide step runs
    once for all micro-batches of a round. Every replica has some `ipus`; a step that is not cut is shown on the first.
    """
    per_round = plan.micro_batches_per_update
    instructions: list[Instruction] = [
        Run(step, index % plan.replicas, index, index % plan.replicas * ipus, index // plan.replicas, commits=not waits)
        for index in range(per_round)
    ]
    if is_wide:
        instructions = [Run(step, 0, 0, 0, 0, commits=not waits, width=per_round, replicas=plan.replicas)]
    if waits:
        after = 1 + max(run.slot for run in instructions)
        instructions.append(Commit(updates, tuple(range(0, plan.replicas * ipus, ipus)), slot=after))
    return Schedule(tuple(instructions), plan.device_iterations, per_round)


def stage_schedule(
    timeline: Timeline, parts: Collection[Part], updates: tuple[str, ...], plan: BatchPlan, *, waits: bool, ipus: int
) -> Schedule:
    """What a timeline says, for every replica: a run for each task that has something to do."""
    instructions: list[Instruction] = []
    for task in timeline.tasks:
        part = (task.kind, task.section)
        for replica in range(plan.replicas) if part in parts else ():
            index = task.micro_batch * plan.replicas + replica
            instructions.append(Run(part_name(part), replica, index, replica * ipus + task.ipu, task.slot))
    per_round = timeline.micro_batches * plan.replicas
    rounds = plan.device_iterations * plan.micro_batches_per_update // per_round
    if waits:
        has_update = any(task.kind is Kind.UPDATE for task in timeline.tasks)
        slot = timeline.slots - 1 if has_update else timeline.slots
        instructions.append(Commit(updates, tuple(range(plan.replicas * ipus)), slot))
    return Schedule(tuple(instructions), rounds, per_round)


def with_reduction(
    schedule: Schedule, accumulators: tuple[str, ...], processes: ProcessSettings, *, averages: bool
) -> Schedule:
    """The schedule of a process that adds up gradients with others: before the commit, once for each update."""
    *before, commit = schedule.instructions
    assert isinstance(commit, Commit), "a step of several processes is cut before its update"
    reduce = Reduce(accumulators, processes.count, commit.ipus, commit.slot, processes.in_order, averages)
    return replace(schedule, instructions=(*before, reduce, replace(commit, slot=commit.slot + 1)))
