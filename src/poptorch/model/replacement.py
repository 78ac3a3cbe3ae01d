"""What an optimiser may change after the model was compiled with it.

Parameters decide: each goes on with the numbers of the group that holds it now, wherever that group is. Which
parameters are trained, and which of them share their numbers, is part of the program; if that changes, the model has to
be compiled again. Whatever else shapes the program is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch

from poptorch.capture import Holder, TrainedGroup
from poptorch.errors import OptimizerError, explain
from poptorch.optim.attributes import check_replacement
from poptorch.optim.plan import OptimizerPlan
from poptorch.optim.rules import kept_as


def check_optimizers(
    compiled: Sequence[OptimizerPlan],
    now: Sequence[OptimizerPlan],
    groups: Sequence[TrainedGroup],
    holders: Mapping[str, Holder],
) -> None:
    """Raise if a model that was compiled for some optimisers cannot go on with these; `holders` are of `now`."""
    if len(now) != len(compiled):
        raise OptimizerError(
            explain(
                f"the model was compiled with {len(compiled)} optimiser(s), not with {len(now)}.",
                fix="pass as many as before, or call destroy() first",
            )
        )
    successors = _successors(groups, holders)
    for index, old in enumerate(compiled):
        _check_optimizer(old, now[successors.get(index, index)])
    for group in groups:
        held = [holders[name] for name in group.names if name in holders]
        for holder in {(holder.optimizer, holder.position): holder for holder in held}.values():
            _check_group(group, holder)


def fits(groups: Sequence[TrainedGroup], holders: Mapping[str, Holder]) -> bool:
    """Whether each group of a program can take its numbers from the groups that hold its parameters now."""
    owners: dict[int, int] = {}  # an optimiser of the program, and the one that is in its place
    for group in groups:
        held = {id(holder.plan): holder for name in group.names if (holder := holders.get(name)) is not None}
        numbers = [holder.plan.values for holder in held.values()]
        is_complete = all(name in holders for name in group.names)
        if not is_complete or any(values != numbers[0] for values in numbers):
            return False
        for holder in held.values():
            if owners.setdefault(group.optimizer, holder.optimizer) != holder.optimizer:
                return False
    return len(set(owners.values())) == len(owners)


def _successors(groups: Sequence[TrainedGroup], holders: Mapping[str, Holder]) -> dict[int, int]:
    """For each optimiser of a program the one that holds its parameters now, or the first of them."""
    found: dict[int, int] = {}
    for group in groups:
        for name in group.names:
            if name in holders:
                found.setdefault(group.optimizer, holders[name].optimizer)
    return found


def inherit_state(before: Sequence[torch.optim.Optimizer], now: Sequence[torch.optim.Optimizer]) -> None:
    """Let optimisers that have no state for a parameter go on with the state that the ones before them had for it.

    Those keep a copy, and what belongs to parameters that nobody holds any more.
    """
    if all(map(is_, before, now)):
        return
    owners = {id(p): old for old in before for group in old.param_groups for p in group["params"]}
    for new in now:
        for parameter in (p for group in new.param_groups for p in group["params"]):
            old = owners.get(id(parameter), new)
            if old is not new and not _has_started(new.state.get(parameter)) and old.state.get(parameter):
                new.state[parameter] = dict(old.state[parameter])
                old.state[parameter] = {key: _copy(value) for key, value in old.state[parameter].items()}


def _has_started(entries: Mapping[str, Any] | None) -> bool:
    """Whether an optimiser has state of its own for a parameter; some make it in their constructor, with no steps."""
    return bool(entries) and bool(entries.get("step", True))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


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


def _check_group(group: TrainedGroup, holder: Holder) -> None:
    new = holder.plan
    if new.rule != group.plan.rule:
        raise OptimizerError(
            explain(
                f"parameter group {holder.position} of the optimiser follows another rule than the program.",
                compiled=str(group.plan.rule),
                now=str(new.rule),
                fix="keep the kind of optimiser and which of its settings are zero, or call destroy() first",
            )
        )
    wanted = dict(new.rule.state_types or ())
    for spec in (spec for layout in group.layouts for key, spec in layout.items() if key in wanted):
        dtype = kept_as(wanted[spec.key], spec.dtype)
        if dtype != spec.dtype:
            raise OptimizerError(
                explain(
                    f"the types of the state cannot change after compilation: {spec.name} would be {dtype}.",
                    compiled=str(spec.dtype),
                    fix="call destroy() first, which lets the model compile again",
                )
            )
    for name, attribute in group.plan.attributes.items():
        check_replacement(f"{name} of parameter group {holder.position}", attribute, new.attributes[name])
