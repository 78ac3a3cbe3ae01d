"""Read an optimiser object: which rule each parameter group follows, and the numbers it has now."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import Parameter

from poptorch._logging import logger
from poptorch.errors import OptimizerError, OptimizerValueError, explain
from poptorch.optim import rules
from poptorch.optim.adafactor import Adafactor
from poptorch.optim.attributes import Attribute, Constness
from poptorch.optim.host_step import HostStep, check_groups_apart, is_torchs, read_numbers
from poptorch.optim.limits import check_captured, check_group, check_number, check_types
from poptorch.optim.optimizer import Optimizer
from poptorch.optim.optimizers import LAMB, MAX_WEIGHT_NORM, SGD, Adam, AdamW, RMSprop
from poptorch.optim.stored import StoredOptimizer

_OURS = (SGD, Adam, AdamW, RMSprop, LAMB)
_TORCHS = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adafactor)
_HALF_OR_FLOAT = (torch.float16, torch.float32)

# The value at which a number of a torch optimiser counts as constant; None: whatever its value is.
_USUAL: dict[str, float | None] = {
    "weight_decay": 0.0,
    "momentum": 0.0,
    "dampening": 0.0,
    "eps": 1e-8,
    "velocity_scaling": 1.0,
    "max_weight_norm": MAX_WEIGHT_NORM,
    "loss_scaling": 1.0,
    "betas": None,
    "alpha": None,
}


NO_SCALING = Attribute(1.0, Constness.UNDECLARED)


@dataclass(frozen=True)
class GroupPlan:
    """One parameter group: its rule, the numbers it has now, and its parameters."""

    rule: rules.Rule
    attributes: dict[str, Attribute]
    params: tuple[Parameter, ...]

    @property
    def values(self) -> dict[str, float]:
        """The current value of each of the rule's hypers."""
        return {name: self.attributes[name].value for name in self.rule.hypers}


@dataclass(frozen=True)
class OptimizerPlan:
    """What one optimiser asks for: its groups, and what holds for all of them."""

    kind: str
    groups: tuple[GroupPlan, ...]
    defaults: dict[str, Attribute] = field(default_factory=dict[str, Attribute])
    loss_scaling: Attribute = NO_SCALING
    max_grad_norm: float = math.inf
    accum_type: torch.dtype | None = None  # None: gradients are added up in their own type
    is_combined: bool = False
    source: type | None = None  # the class of the object that was read

    @property
    def state_types(self) -> dict[str, torch.dtype]:
        return dict(self.groups[0].rule.state_types or ()) if self.groups else {}


def plan_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    before: Sequence[OptimizerPlan] = (),
    *,
    automatic_loss_scaling: bool = False,
) -> tuple[OptimizerPlan, ...]:
    """Read every optimiser as it is now; they must not share a parameter. `before` spares repeated trials."""
    if not optimizers:
        raise OptimizerError(
            explain(
                "the list of optimisers is empty.",
                fix="put an optimiser into it, or leave the argument out for SGD with lr 0.01",
            )
        )
    pairs = itertools.zip_longest(optimizers, before[: len(optimizers)])
    plans = tuple(plan_optimizer(optimizer, plan) for optimizer, plan in pairs)
    owners: dict[int, int] = {}
    for index, plan in enumerate(plans):
        for parameter in (parameter for group in plan.groups for parameter in group.params):
            if owners.setdefault(id(parameter), index) != index:
                raise OptimizerError(
                    explain(
                        f"a parameter of shape {list(parameter.shape)} belongs to optimiser {owners[id(parameter)]} "
                        f"and to optimiser {index}.",
                        fix="give each parameter to one optimiser only",
                    )
                )
    if automatic_loss_scaling:
        plans = tuple(replace(plan, loss_scaling=Attribute(plan.loss_scaling.value)) for plan in plans)
    scalings = {plan.loss_scaling.value for plan in plans}
    if len(scalings) > 1:
        raise OptimizerError(
            explain(
                f"the optimisers have different loss scalings, {sorted(scalings)}, but there is one loss.",
                fix="give all of them the same loss_scaling",
            )
        )
    return plans


def plan_optimizer(optimizer: torch.optim.Optimizer, before: OptimizerPlan | None = None) -> OptimizerPlan:
    """Read the rules and the numbers of an optimiser."""
    if isinstance(optimizer, StoredOptimizer):
        return _plan_stored(optimizer)
    known = next((kind for kind in (*_OURS, *_TORCHS) if isinstance(optimizer, kind)), None)
    if known is not None and type(optimizer).step is not known.step:
        known = None  # what it does is in a step() of its own
    if known is None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptimizerError(
                explain(
                    f"an optimiser is expected, not {type(optimizer).__name__}.",
                    fix="pass an object from poptorch.optim or torch.optim, or a list of them",
                )
            )
        return _plan_host_step(optimizer, before)
    if type(optimizer) is not known:
        _warn_about_python(optimizer, before, f"it is compiled as {known.__name__}")
    reader = _Reader(optimizer)
    read = next(function for kind, function in _READERS.items() if isinstance(optimizer, kind))
    groups = tuple(reader.group(group, index, read) for index, group in enumerate(optimizer.param_groups))
    return OptimizerPlan(
        kind=_kind(optimizer),
        groups=groups,
        defaults=reader.attributes(optimizer.defaults, "the defaults", groups[0].attributes) if groups else {},
        loss_scaling=reader.attribute("loss_scaling", reader.own("loss_scaling", 1.0), "the optimiser"),
        max_grad_norm=reader.max_grad_norm(),
        accum_type=reader.accum_type(),
        is_combined=bool(reader.own("use_combined_accum", False)),
        source=type(optimizer),
    )


def _plan_host_step(optimizer: torch.optim.Optimizer, before: OptimizerPlan | None) -> OptimizerPlan:
    if not is_torchs(type(optimizer)):
        _warn_about_python(optimizer, before, "its step() is captured once and repeated as a program")
    groups: list[GroupPlan] = []
    for index, group in enumerate(optimizer.param_groups):
        known = before.groups[index] if before is not None and index < len(before.groups) else None
        numbers = read_numbers(group)
        check_captured(optimizer, group, numbers, f"parameter group {index}")
        rule = HostStep.of(optimizer, group, None if known is None else known.rule)
        attributes = {
            name: Attribute(value, Constness.VARIABLE if name in rule.variable else Constness.CONSTANT)
            for name, value in numbers.items()
        }
        params = tuple(parameter for parameter in group["params"] if parameter.requires_grad)
        groups.append(GroupPlan(rule, attributes, params))
    if before is None or len(before.groups) != len(groups):
        check_groups_apart(optimizer)
    return OptimizerPlan(type(optimizer).__name__, tuple(groups), source=type(optimizer))


def _plan_stored(optimizer: StoredOptimizer) -> OptimizerPlan:
    groups: list[GroupPlan] = []
    for group, rule in zip(optimizer.param_groups, optimizer.rules, strict=True):
        attributes = {
            name: Attribute(value, Constness.VARIABLE if name in rule.hypers else Constness.CONSTANT)
            for name, value in read_numbers(group).items()
        }
        params = tuple(parameter for parameter in group["params"] if parameter.requires_grad)
        groups.append(GroupPlan(rule, attributes, params))
    return OptimizerPlan(optimizer.kind, tuple(groups), source=type(optimizer))


def _warn_about_python(optimizer: torch.optim.Optimizer, before: OptimizerPlan | None, what: str) -> None:
    kind = type(optimizer)
    if before is None or before.source is not kind:  # a schedule lets the same optimiser be read in every step
        logger.warning("Poptorch does not run Python optimizer code directly. %s: %s.", kind.__name__, what)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """The name of the update on an IPU; a twin from torch has the same name."""
    if isinstance(optimizer, torch.optim.SGD):
        return "SGD1" if getattr(optimizer, "use_combined_accum", False) else "SGD2"
    if isinstance(optimizer, LAMB):
        return "LAMB" if optimizer.bias_correction else "LAMB_NO_BIAS"
    if isinstance(optimizer, torch.optim.AdamW):
        return "ADAMW" if getattr(optimizer, "bias_correction", True) else "ADAMW_NO_BIAS"
    if isinstance(optimizer, torch.optim.Adam):
        return "ADAM"
    if isinstance(optimizer, torch.optim.Adafactor):
        return "Adafactor"
    centered = [bool(group.get("centered")) for group in optimizer.param_groups]
    if isinstance(optimizer, Optimizer) and len(set(centered)) > 1:
        raise OptimizerError(
            explain(
                f"the groups of an RMSprop disagree on centered: {centered}.",
                fix="use the same value in all groups, or several optimisers",
            )
        )
    return "RMSPROP_CENTERED" if any(centered) else "RMSPROP"


class _Reader:
    """Reads numbers out of one optimiser, with the checks and the constness of its class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.is_ours = isinstance(optimizer, Optimizer)

    def own(self, name: str, default: Any) -> Any:
        return getattr(self.optimizer, name, default) if self.is_ours else default

    def group(self, group: dict[str, Any], index: int, read: Callable[..., Any]) -> GroupPlan:
        where = f"parameter group {index}"
        rule, names = read(self, group, where)
        check_group(self.optimizer, group, where)
        params = tuple(parameter for parameter in group["params"] if parameter.requires_grad)
        return GroupPlan(rule, names, params)

    def attributes(
        self, group: dict[str, Any], where: str, names: Sequence[str] | dict[str, Any]
    ) -> dict[str, Attribute]:
        found: dict[str, Attribute] = {}
        for name in names:
            if name in ("beta1", "beta2"):
                found[name] = self.attribute("betas", self._betas(group, where)[name == "beta2"], where)
            elif name in ("eps1", "eps2"):
                value = self.entry(group, "eps", where)[name == "eps2"]
                if value is not None:  # eps1 may be left to the type of the parameter
                    found[name] = self.attribute(name, value, where)
            else:
                found[name] = self.attribute(name, self.entry(group, name, where), where)
        return found

    def entry(self, group: dict[str, Any], name: str, where: str) -> Any:
        if name not in group:
            raise OptimizerError(
                explain(
                    f"{where} has no {name}, which {type(self.optimizer).__name__} needs.",
                    reason="it was deleted, or a state dictionary of another kind of optimiser was loaded",
                    fix=f"set {name}, or load a state dictionary of the same kind",
                )
            )
        return group[name]

    def attribute(self, name: str, value: Any, where: str) -> Attribute:
        number = self._number(name, value, where)
        if isinstance(self.optimizer, Optimizer):
            is_constant = self.optimizer.variable_attrs.isConstant(name)
            return Attribute(number, Constness.CONSTANT if is_constant else Constness.VARIABLE)
        usual = (
            1e-2
            if name == "weight_decay" and isinstance(self.optimizer, torch.optim.AdamW)
            else _USUAL.get(name, math.nan)
        )
        return Attribute(number, Constness.UNDECLARED if usual is None or number == usual else Constness.VARIABLE)

    def _betas(self, group: dict[str, Any], where: str) -> tuple[Any, Any]:
        betas = self.entry(group, "betas", where)
        kinds = tuple if self.is_ours else (tuple, list)
        if not isinstance(betas, kinds) or len(betas) != 2:
            raise OptimizerError(
                explain(
                    f"betas of {where} is {betas!r}, not a tuple of two numbers.",
                    fix="write for example betas=(0.9, 0.999)",
                )
            )
        for beta in betas:
            if not 0 <= self._number("betas", beta, where) < 1:
                raise OptimizerError(
                    explain(f"betas of {where} is {betas!r}.", fix="choose numbers of at least 0 and below 1")
                )
        return tuple(betas)

    def _number(self, name: str, value: Any, where: str) -> float:
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not self.is_ours:
            value = value.item()
        if not isinstance(value, numbers.Real):
            raise OptimizerError(
                explain(
                    f"{name} of {where} is {value!r}, not a number.",
                    optimiser=type(self.optimizer).__name__,
                    fix=f"set {name} to a float",
                )
            )
        check_number(name, float(value), where)
        return float(value)

    def max_grad_norm(self) -> float:
        value = self.own("max_grad_norm", math.inf)
        if not isinstance(value, numbers.Real) or math.isnan(value) or value <= 0:
            raise OptimizerError(
                explain(f"max_grad_norm is {value!r}.", fix="choose a positive number, or inf for no limit")
            )
        return float(value)

    def accum_type(self) -> torch.dtype | None:
        types = [name for name in vars(self.optimizer) if name.endswith("accum_type")] if self.is_ours else []
        for name in types:
            if getattr(self.optimizer, name) not in _HALF_OR_FLOAT:
                raise OptimizerValueError(
                    explain(
                        f"{name} is {getattr(self.optimizer, name)!r}.",
                        fix="choose torch.float16 or torch.float32",
                    )
                )
        if not self.is_ours or self.own("use_combined_accum", False):
            return None
        return self.own("accum_type", torch.float32)

    def moment_types(self, first: Sequence[str], second: Sequence[str]) -> tuple[tuple[str, torch.dtype], ...] | None:
        """The types of the state tensors, for an optimiser that chooses them."""
        if not self.is_ours:
            return None
        first_type = self.own("first_order_momentum_accum_type", torch.float32)
        second_type = self.own("second_order_momentum_accum_type", torch.float32)
        return (*((name, first_type) for name in first), *((name, second_type) for name in second))


Read = tuple[rules.Rule, dict[str, Attribute]]


def _read_sgd(reader: _Reader, group: dict[str, Any], where: str) -> Read:
    found = reader.attributes(group, where, ("lr", "momentum", "dampening", "weight_decay"))
    maximize, nesterov = bool(group.get("maximize")), bool(reader.entry(group, "nesterov", where))
    if reader.is_ours and found["lr"].is_zero:
        raise OptimizerError(
            explain(f"lr of {where} is a constant zero.", fix="give lr to the constructor, or mark it as variable")
        )
    is_combined = reader.own("use_combined_accum", False)
    if is_combined:
        found |= reader.attributes(group, where, ("velocity_scaling",))
    has_momentum = not found["momentum"].is_zero
    if is_combined and has_momentum:
        return rules.CombinedSGD(maximize=maximize, nesterov=nesterov, state_types=()), found
    has_dampening = not found["dampening"].is_zero and (has_momentum or reader.is_ours)
    rule = rules.SGD(
        maximize=maximize,
        momentum=has_momentum,
        dampening=has_dampening,
        weight_decay=not found["weight_decay"].is_zero,
        nesterov=nesterov,
        always_dampens=has_dampening and reader.is_ours,
        state_types=(("momentum_buffer", reader.own("velocity_accum_type", torch.float32)),)
        if reader.is_ours
        else None,
    )
    return rule, found


def _read_adam(reader: _Reader, group: dict[str, Any], where: str) -> Read:
    amsgrad = bool(reader.entry(group, "amsgrad", where))
    if reader.is_ours and amsgrad:
        raise OptimizerValueError(
            explain(
                "Only non-amsgrad Adam/AdamW optimizers are supported.",
                fix="leave out amsgrad, or use the class of the same name from torch.optim, which has it",
            )
        )
    found = reader.attributes(group, where, ("lr", "beta1", "beta2", "eps", "weight_decay"))
    decoupled = isinstance(reader.optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
    rule = rules.Adam(
        maximize=bool(group.get("maximize")),
        weight_decay=not found["weight_decay"].is_zero,
        decoupled=decoupled,
        amsgrad=amsgrad,
        state_types=reader.moment_types(("exp_avg",), ("exp_avg_sq",)),
    )
    return rule, found


def _read_rmsprop(reader: _Reader, group: dict[str, Any], where: str) -> Read:
    found = reader.attributes(group, where, ("lr", "alpha", "eps", "momentum", "weight_decay"))
    rule = rules.RMSprop(
        maximize=bool(group.get("maximize")),
        momentum=not found["momentum"].is_zero,
        weight_decay=not found["weight_decay"].is_zero,
        centered=bool(reader.entry(group, "centered", where)),
        as_tensorflow=bool(reader.own("use_tf_variant", False)),
        state_types=reader.moment_types(("grad_avg",), ("square_avg",)),
    )
    return rule, found


def _read_lamb(reader: _Reader, group: dict[str, Any], where: str) -> Read:
    found = reader.attributes(group, where, ("lr", "beta1", "beta2", "eps", "weight_decay", "max_weight_norm"))
    types = reader.moment_types(("exp_avg",), ("exp_avg_sq",))
    return rules.LAMB(bias_correction=bool(reader.own("bias_correction", True)), state_types=types), found


def _read_adafactor(reader: _Reader, group: dict[str, Any], where: str) -> Read:
    check_types(reader.optimizer, group, where)  # of the pair `eps`, before it is taken apart
    found = reader.attributes(group, where, ("lr", "beta2_decay", "eps1", "eps2", "d", "weight_decay"))
    rule = Adafactor(
        maximize=bool(group.get("maximize")),
        weight_decay=not found["weight_decay"].is_zero,
        has_eps1="eps1" in found,
    )
    return rule, found


_READERS: dict[type, Callable[[_Reader, dict[str, Any], str], Read]] = {
    torch.optim.SGD: _read_sgd,
    torch.optim.Adam: _read_adam,  # AdamW is a subclass that sets decoupled_weight_decay
    torch.optim.RMSprop: _read_rmsprop,
    LAMB: _read_lamb,
    torch.optim.Adafactor: _read_adafactor,
}
