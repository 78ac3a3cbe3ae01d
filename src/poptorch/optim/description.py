"""An optimiser as lines of the debug log: one for what holds for all its groups, one for each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from poptorch.optim.attributes import Attribute
from poptorch.optim.plan import OptimizerPlan

_NAMES = {
    "lr": "learningRate",
    "weight_decay": "weightDecay",
    "momentum": "momentum",
    "dampening": "dampening",
    "velocity_scaling": "velocityScaling",
    "beta1": "beta1",
    "beta2": "beta2",
    "eps": "eps",
    "alpha": "alpha",
    "max_weight_norm": "maxWeightNorm",
}
_FIRST, _SECOND = ("momentum_buffer", "exp_avg", "grad_avg"), ("exp_avg_sq", "square_avg")


def describe(plan: OptimizerPlan, tensors: Sequence[Sequence[str]]) -> list[str]:
    """The lines for an optimiser; `tensors` are the names of the parameters of each group."""
    kind = plan.kind.partition("_")[0]
    first = plan.groups[0].rule if plan.groups else None
    types = plan.state_types
    facts = {
        **{f"default{_name(n)[0].upper()}{_name(n)[1:]}": a for n, a in _attributes(plan, plan.defaults).items()},
        "lossScaling": plan.loss_scaling,
        "nesterov": int(getattr(first, "nesterov", False)),
        "accumType": _type(plan.accum_type),
        "firstOrderMomentumAccumType": _type(next((types[n] for n in _FIRST if n in types), None)),
        "secondOrderMomentumAccumType": _type(next((types[n] for n in _SECOND if n in types), None)),
        "useTfVariant": int(getattr(first, "as_tensorflow", False)),
        "maxGradNorm": f"{plan.max_grad_norm:.9g}",
    }
    lines = [f"Updating graph optimizer with {kind}, {_join(facts)}"]
    for index, (group, names) in enumerate(zip(plan.groups, tensors, strict=True)):
        numbers = {_name(name): a for name, a in _attributes(plan, group.attributes).items()}
        lines.append(
            f"Updating group {index} optimizer with {kind}, {_join(numbers)} for (tensors affected {list(names)})"
        )
    return lines


def _attributes(plan: OptimizerPlan, attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """The numbers; the separate variant of SGD has a velocity that is scaled like the loss."""
    return {**attributes, "velocity_scaling": plan.loss_scaling} if plan.kind == "SGD2" else dict(attributes)


def _name(name: str) -> str:
    return _NAMES.get(name, name)


def _type(dtype: torch.dtype | None) -> str:
    return str(dtype or torch.float32).removeprefix("torch.")


def _join(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in facts.items())
