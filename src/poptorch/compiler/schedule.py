"""Decide in which order a call runs its programs."""

from __future__ import annotations

from poptorch.executable import Commit, Instruction, Run, Schedule
from poptorch.options import BatchPlan


def plan_schedule(
    step: str, updates: tuple[str, ...], plan: BatchPlan, *, waits: bool, is_wide: bool = False
) -> Schedule:
    """One round per device iteration: the step for every micro-batch of an update, then the updates.

    If it `waits`, nothing that a step writes is final before all steps of the round have succeeded. A wide step runs
    once for all micro-batches of a round.
    """
    per_round = plan.micro_batches_per_update
    instructions: list[Instruction] = [
        Run(step, index % plan.replicas, index, index % plan.replicas, index // plan.replicas, commits=not waits)
        for index in range(per_round)
    ]
    if is_wide:
        instructions = [Run(step, 0, 0, 0, 0, commits=not waits, width=per_round, replicas=plan.replicas)]
    if waits:
        after = 1 + max(run.slot for run in instructions)
        instructions.append(Commit(updates, tuple(range(plan.replicas)), slot=after))
    return Schedule(tuple(instructions), plan.device_iterations, per_round)
