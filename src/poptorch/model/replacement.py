"""What an optimiser may change after the model was compiled with it: its variable numbers, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from poptorch._logging import warn_once
from poptorch.capture import TrainedGroup
from poptorch.errors import OptimizerError, explain
from poptorch.optim.attributes import check_replacement
from poptorch.optim.plan import OptimizerPlan


def check_optimizers(
    compiled: Sequence[OptimizerPlan], now: Sequence[OptimizerPlan], groups: Sequence[TrainedGroup]
) -> None:
    """Raise if a program that was compiled for some optimisers cannot go on with these."""
    if len(now) != len(compiled):
        raise OptimizerError(
            explain(
                f"the model was compiled with {len(compiled)} optimiser(s), not with {len(now)}.",
                fix="pass as many as before, in the same order, or call destroy() first",
            )
        )
    for old, new in zip(compiled, now, strict=True):
        _check_optimizer(old, new)
        if len(new.groups) > len(old.groups):
            warn_once(
                explain(
                    f"the optimiser has {len(new.groups)} parameter groups, but the model was compiled with "
                    f"{len(old.groups)}: parameters of the others are not trained.",
                    fix="call destroy() first, which lets the model compile again",
                )
            )
    for group in groups:
        _check_group(group, now[group.optimizer])


def _check_optimizer(old: OptimizerPlan, new: OptimizerPlan) -> None:
    facts = {
        "kind of optimiser": (old.kind, new.kind),
        "max_grad_norm": (old.max_grad_norm, new.max_grad_norm),
        "accum_type": (old.accum_type, new.accum_type),
    }
    for what, (before, after) in facts.items():
        if before != after and None not in (before, after):
            raise OptimizerError(
                explain(
                    f"the {what} cannot change after compilation.",
                    compiled=str(before),
                    now=str(after),
                    fix="call destroy() first, which lets the model compile again",
                )
            )
    check_replacement("loss_scaling", old.loss_scaling, new.loss_scaling)


def _check_group(group: TrainedGroup, plan: OptimizerPlan) -> None:
    if group.position >= len(plan.groups):
        raise OptimizerError(
            explain(
                f"the optimiser has {len(plan.groups)} parameter group(s), but group {group.position} was compiled.",
                fix="keep the groups that the model was compiled with, or call destroy() first",
            )
        )
    new = plan.groups[group.position]
    if new.rule != group.plan.rule:
        raise OptimizerError(
            explain(
                f"parameter group {group.position} of the optimiser follows another rule than the program.",
                compiled=str(group.plan.rule),
                now=str(new.rule),
                fix="keep the kind of optimiser and which of its settings are zero, or call destroy() first",
            )
        )
    wanted = dict(new.rule.state_types or ())
    for spec in (spec for layout in group.layouts for key, spec in layout.items() if key in wanted):
        dtype = wanted[spec.name.partition(":")[2]]
        if dtype != spec.dtype:
            raise OptimizerError(
                explain(
                    f"the types of the state cannot change after compilation: {spec.name} would be {dtype}.",
                    compiled=str(spec.dtype),
                    fix="call destroy() first, which lets the model compile again",
                )
            )
    for name, attribute in group.plan.attributes.items():
        check_replacement(f"{name} of parameter group {group.position}", attribute, new.attributes[name])
