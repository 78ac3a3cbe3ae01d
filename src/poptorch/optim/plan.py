"""Read an optimiser object: which rule each parameter group follows, and the numbers it has now."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from poptorch._logging import logger
from poptorch.errors import OptimizerError, explain
from poptorch.optim import rules


@dataclass(frozen=True)
class GroupPlan:
    """One parameter group: its rule, the current value of each of the rule's hypers, and its parameters."""

    rule: rules.Rule
    values: dict[str, float]
    params: tuple[Parameter, ...]


_SUPPORTED = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop)


def plan_groups(optimizer: torch.optim.Optimizer) -> tuple[GroupPlan, ...]:
    """Read the rule and the numbers of every group out of the optimiser, as they are now."""
    if not isinstance(optimizer, _SUPPORTED):
        names = ", ".join(f"torch.optim.{kind.__name__}" for kind in _SUPPORTED)
        raise OptimizerError(
            explain(
                f"the optimiser {type(optimizer).__name__} cannot be compiled.",
                supported=names,
                fix="pass one of these, or a subclass that changes no more than their options",
            )
        )
    if type(optimizer) not in _SUPPORTED:
        logger.warning(
            "Poptorch does not run Python optimizer code directly: %s is compiled as %s, its own step() is not used.",
            type(optimizer).__name__,
            next(kind.__name__ for kind in _SUPPORTED if isinstance(optimizer, kind)),
        )
    return tuple(_plan_group(optimizer, index, group) for index, group in enumerate(optimizer.param_groups))


def _plan_group(optimizer: torch.optim.Optimizer, index: int, group: dict[str, Any]) -> GroupPlan:
    def number(name: str, value: Any = None) -> float:
        value = group[name] if value is None else value
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, numbers.Real):
            raise OptimizerError(
                explain(
                    f"{name} of parameter group {index} is {value!r}, not a number.",
                    optimiser=type(optimizer).__name__,
                    fix=f"set optimizer.param_groups[{index}][{name!r}] to a float",
                )
            )
        return float(value)

    rule, values = _read(optimizer, group, number)
    params = tuple(param for param in group["params"] if param.requires_grad)
    return GroupPlan(rule, {name: values[name] for name in rule.hypers}, params)


def _read(optimizer: torch.optim.Optimizer, group: dict[str, Any], number: Any) -> tuple[rules.Rule, dict[str, float]]:
    """The rule of a group and its numbers; a number that is zero shapes the rule and is left out of the program."""
    maximize = bool(group.get("maximize"))
    if isinstance(optimizer, torch.optim.SGD):
        values = {name: number(name) for name in ("lr", "momentum", "dampening", "weight_decay")}
        rule = rules.SGD(
            maximize=maximize,
            momentum=values["momentum"] != 0,
            dampening=values["momentum"] != 0 and values["dampening"] != 0,
            weight_decay=values["weight_decay"] != 0,
            nesterov=bool(group["nesterov"]),
        )
    elif isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass that sets decoupled_weight_decay
        values = {name: number(name) for name in ("lr", "eps", "weight_decay")}
        values["beta1"], values["beta2"] = (number("betas", beta) for beta in group["betas"])
        rule = rules.Adam(
            maximize=maximize,
            weight_decay=values["weight_decay"] != 0,
            decoupled=isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay")),
            amsgrad=bool(group["amsgrad"]),
        )
    else:
        values = {name: number(name) for name in ("lr", "alpha", "eps", "momentum", "weight_decay")}
        rule = rules.RMSprop(
            maximize=maximize,
            momentum=values["momentum"] != 0,
            weight_decay=values["weight_decay"] != 0,
            centered=bool(group["centered"]),
        )
    return rule, values
