"""Decide in which order a call runs its programs."""

from __future__ import annotations

from poptorch.executable import Commit, Instruction, Run, Schedule
from poptorch.options import BatchPlan


def plan_schedule(step: str, updates: tuple[str, ...], plan: BatchPlan, *, waits: bool) -> Schedule:
    """One round per device iteration: the step for every micro-batch of an update, then the updates.

    If it `waits`, nothing that a step writes is final before all steps of the round have succeeded.
    """
    per_round = plan.micro_batches_per_update
    instructions: list[Instruction] = [
        Run(step, index % plan.replicas, index, index % plan.replicas, index // plan.replicas, commits=not waits)
        for index in range(per_round)
    ]
    if waits:
        instructions.append(Commit(updates, tuple(range(plan.replicas)), slot=plan.gradient_accumulation))
    return Schedule(tuple(instructions), plan.device_iterations, per_round)
