"""Which parameters a training step updates, and the names and types of the state that their update needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from poptorch.errors import OptimizerError, explain
from poptorch.ir import InputSpec, Role
from poptorch.optim.gradients import Clipping
from poptorch.optim.plan import GroupPlan, OptimizerPlan

COUNTER = "counter"
LOSS_SCALING = InputSpec("loss:scaling", Role.HYPER, (), torch.float32, ())
SCALE_FACTOR = InputSpec("loss:scale_factor", Role.OPTIMIZER_STATE, (), torch.float32, ())


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
    def counter_name(self) -> str:
        return f"group{self.index}:{COUNTER}"

    def hyper_name(self, hyper: str) -> str:
        return f"group{self.index}:{hyper}"


@dataclass(frozen=True)
class Update:
    """Everything the update consists of: the optimisers with their groups, and what happens to gradients before."""

    optimizers: tuple[OptimizerPlan, ...]
    groups: tuple[TrainedGroup, ...]
    clipping: Clipping
    scales: tuple[InputSpec, ...]  # what the loss was multiplied with

    @property
    def adapts_scale(self) -> bool:
        return SCALE_FACTOR in self.scales


def loss_scales(plans: Sequence[OptimizerPlan], *, automatic: bool) -> tuple[InputSpec, ...]:
    """The numbers that the loss is multiplied with before it is differentiated; none if it would be a constant 1."""
    if automatic:
        return (LOSS_SCALING, SCALE_FACTOR)
    is_one = all(plan.loss_scaling.value == 1 and plan.loss_scaling.is_constant for plan in plans)
    return () if is_one else (LOSS_SCALING,)


def trained_groups(
    module: nn.Module, plans: Sequence[OptimizerPlan], with_gradient: set[str]
) -> tuple[TrainedGroup, ...]:
    """Match the optimisers' groups with the parameters of the model that have a gradient."""
    parameters = {id(parameter): name for name, parameter in module.named_parameters()}
    groups: list[TrainedGroup] = []
    numbered = [(o, g, group) for o, plan in enumerate(plans) for g, group in enumerate(plan.groups)]
    for index, (optimizer, position, plan) in enumerate(numbered):
        for parameter in plan.params:
            if id(parameter) not in parameters:
                raise OptimizerError(
                    explain(
                        f"parameter group {position} of the optimiser holds a parameter of shape "
                        f"{list(parameter.shape)} that is not part of the model.",
                        fix="build the optimiser from the parameters of the model that is wrapped",
                    )
                )
        trained = [(parameters[id(p)], p) for p in plan.params if parameters[id(p)] in with_gradient]
        names = tuple(name for name, _ in trained)
        layouts = tuple(_layout(plan, name, parameter) for name, parameter in trained)
        groups.append(TrainedGroup(index, optimizer, position, plan, names, layouts))
    return tuple(group for group in groups if group.names)


def _layout(plan: GroupPlan, name: str, parameter: nn.Parameter) -> dict[str, InputSpec]:
    """The state inputs of one parameter, by torch's names for them."""
    layout: dict[str, InputSpec] = {}
    for key, tensor in plan.rule.initial_state(parameter, plan.values).items():
        spec = InputSpec.of(f"{name}:{key}", Role.OPTIMIZER_STATE, tensor)
        is_alike = spec.shape == tuple(parameter.shape)
        layout[key] = replace(spec, stride=tuple(parameter.stride())) if is_alike else spec
    return layout
