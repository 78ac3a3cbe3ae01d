"""Which parameters a training step updates, and the names and types of the state that their update needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from poptorch.errors import OptimizerError, explain
from poptorch.ir import InputSpec, Role
from poptorch.optim.gradients import Clipping
from poptorch.optim.plan import GroupPlan, OptimizerPlan

COUNTER = "counter"
LOSS_SCALING = InputSpec("loss:scaling", Role.HYPER, (), torch.float32, (), key="scaling")
SCALE_FACTOR = InputSpec("loss:scale_factor", Role.OPTIMIZER_STATE, (), torch.float32, (), key="scale_factor")


class Holder(NamedTuple):
    """Who updates a parameter: an optimiser, and in it a group."""

    parameter: nn.Parameter
    optimizer: int
    position: int  # among the groups of its optimiser
    plan: GroupPlan


@dataclass(frozen=True)
class TrainedGroup:
    """The parameters of one group that the loss reaches, by name; it owns the names of the group's state inputs."""

    index: int  # counted over all optimisers
    optimizer: int
    position: int  # among the groups of its optimiser
    plan: GroupPlan
    names: tuple[str, ...]
    layouts: tuple[dict[str, InputSpec], ...]  # of the state of each parameter

    @property
    def counts(self) -> bool:
        return self.plan.rule.counts_steps or self.plan.rule.needs_started

    @property
    def counter(self) -> InputSpec:
        """The steps that each parameter of the group has taken, or whether it has taken any."""
        name, shape = f"group{self.index}:{COUNTER}", (len(self.names),)
        return InputSpec(name, Role.OPTIMIZER_STATE, shape, torch.float32, (1,), key=COUNTER, group=self.index)

    @property
    def hypers(self) -> tuple[InputSpec, ...]:
        """The numbers that may change between calls."""
        return tuple(
            InputSpec(f"group{self.index}:{name}", Role.HYPER, (), torch.float64, (), key=name, group=self.index)
            for name in self.plan.rule.hypers
        )


@dataclass(frozen=True)
class Update:
    """Everything the update consists of: the optimisers with their groups, and what happens to gradients before."""

    optimizers: tuple[OptimizerPlan, ...]
    groups: tuple[TrainedGroup, ...]
    clipping: Clipping
    scales: tuple[InputSpec, ...]  # what the loss was multiplied with
    loss_type: torch.dtype

    @property
    def adapts_scale(self) -> bool:
        return SCALE_FACTOR in self.scales


def loss_scales(plans: Sequence[OptimizerPlan], *, automatic: bool) -> tuple[InputSpec, ...]:
    """The numbers that the loss is multiplied with before it is differentiated; none if it would be a constant 1."""
    if automatic:
        return (LOSS_SCALING, SCALE_FACTOR)
    is_one = all(plan.loss_scaling.value == 1 and plan.loss_scaling.is_constant for plan in plans)
    return () if is_one else (LOSS_SCALING,)


def holders_of(module: nn.Module, plans: Sequence[OptimizerPlan]) -> dict[str, Holder]:
    """Who updates each parameter of a model, by its name; raises for parameters that are not part of the model."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, Holder] = {}
    for optimizer, plan in enumerate(plans):
        for position, group in enumerate(plan.groups):
            for parameter in group.params:
                if id(parameter) not in names:
                    raise OptimizerError(
                        explain(
                            f"parameter group {position} of the optimiser holds a parameter of shape "
                            f"{list(parameter.shape)} that is not part of the model.",
                            fix="build the optimiser from the parameters of the model that is wrapped",
                        )
                    )
                found[names[id(parameter)]] = Holder(parameter, optimizer, position, group)
    return found


def trained_groups(
    module: nn.Module, plans: Sequence[OptimizerPlan], with_gradient: Collection[str]
) -> tuple[TrainedGroup, ...]:
    """Match the optimisers' groups with the parameters of the model that have a gradient."""
    members: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for name, holder in holders_of(module, plans).items():
        if name in with_gradient:
            members[holder.optimizer, holder.position].append(name)
    groups: list[TrainedGroup] = []
    numbered = [(o, g, group) for o, plan in enumerate(plans) for g, group in enumerate(plan.groups)]
    for index, (optimizer, position, plan) in enumerate(numbered):
        names = tuple(members[optimizer, position])
        layouts = tuple(_layout(plan, name, module.get_parameter(name)) for name in names)
        groups.append(TrainedGroup(index, optimizer, position, plan, names, layouts))
    return tuple(group for group in groups if group.names)


def _layout(plan: GroupPlan, name: str, parameter: nn.Parameter) -> dict[str, InputSpec]:
    """The state inputs of one parameter, by torch's names for them."""
    layout: dict[str, InputSpec] = {}
    for key, tensor in plan.rule.expected_state(parameter, plan.values).items():
        spec = InputSpec.of(f"{name}:{key}", Role.OPTIMIZER_STATE, tensor, owner=name, key=key)
        is_alike = spec.shape == tuple(parameter.shape)
        layout[key] = replace(spec, stride=tuple(parameter.stride())) if is_alike else spec
    return layout
