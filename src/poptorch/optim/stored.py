"""Optimisers as plain data and tensors, and back.

Torch's optimisers and ours come back as objects of their classes, without running a constructor. Of any other class
there is a stand-in: it has the numbers and the state, and goes on training a program that is compiled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from poptorch.errors import OptimizerError, explain
from poptorch.optim import optimizers as ours
from poptorch.optim.attributes import VariableAttributes
from poptorch.optim.optimizer import Optimizer
from poptorch.optim.rules import Hypers, Rule, State

Data = Any  # what JSON can hold
Values = Callable[[Any], Data]  # to data, or from data


@dataclass(frozen=True, kw_only=True)
class StoredRule(Rule):
    """A rule of which only the program is left: what it is called, and the numbers that may change."""

    text: str
    names: tuple[str, ...]

    @property
    def hypers(self) -> tuple[str, ...]:
        return self.names

    @property
    def state(self) -> tuple[str, ...]:
        return ()

    def update(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], list[State]]:
        raise OptimizerError(_only_compiled("the model"))

    def __str__(self) -> str:
        return self.text


class StoredOptimizer(torch.optim.Optimizer):
    """An optimiser that was read from a file, and whose class is not one of torch's or ours."""

    kind: str
    rules: tuple[StoredRule, ...]  # of its groups

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """There is no Python code to take a step with."""
        raise OptimizerError(_only_compiled(f"the optimiser {self.kind}"))


def _only_compiled(what: str) -> str:
    return explain(
        f"{what} was loaded from a file, in which its update is a compiled program only.",
        fix="call the training model, which runs the update; to compile anew, wrap the model with its own optimiser",
    )


def optimizer_data(
    optimizer: torch.optim.Optimizer, rules: list[Rule], names: Mapping[int, str], encode: Values
) -> Data:
    """An optimiser as data; `names` are of parameters by id, `encode` gives the data of values and tensors."""
    groups = [
        {
            "params": [names[id(p)] for p in group["params"]],
            "numbers": {name: encode(value) for name, value in group.items() if name != "params"},
            "rule": [str(rule), list(rule.hypers)],
        }
        for group, rule in zip(optimizer.param_groups, rules, strict=True)
    ]
    state = {
        names[id(p)]: {key: encode(value) for key, value in optimizer.state[p].items()}
        for group in optimizer.param_groups
        for p in group["params"]
        if p in optimizer.state
    }
    own = {name: encode(getattr(optimizer, name)) for name in getattr(optimizer, "OWN", ())}
    variable = getattr(optimizer, "variable_attrs", None)
    return {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "defaults": {name: encode(value) for name, value in optimizer.defaults.items()},
        "groups": groups,
        "state": state,
        "own": own,
        "variable": None if variable is None else [variable._variable, variable._allowed_attributes],
    }


def optimizer_from(data: Data, parameters: Mapping[str, Parameter], decode: Values) -> torch.optim.Optimizer:
    """The optimiser that data describe, on these parameters."""
    groups = [
        {
            "params": [parameters[name] for name in group["params"]],
            **{str(name): decode(value) for name, value in group["numbers"].items()},
        }
        for group in data["groups"]
    ]
    state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for name, entries in data["state"].items():
        state[parameters[name]] = {str(key): decode(value) for key, value in entries.items()}
    kind = _KNOWN.get(data["class"], StoredOptimizer)
    found = object.__new__(kind)
    attributes: dict[str, Any] = {
        "defaults": {str(name): decode(value) for name, value in data["defaults"].items()},
        "param_groups": groups,
        "state": state,
    }
    if issubclass(kind, Optimizer):
        attributes.update(_of_ours(kind, data, decode))
    found.__setstate__(attributes)
    if isinstance(found, StoredOptimizer):
        found.kind = str(data["class"]).rpartition(".")[2]
        found.rules = tuple(StoredRule(text=str(r[0]), names=tuple(map(str, r[1]))) for r in _rules(data))
    return found


def _rules(data: Data) -> list[Data]:
    return [group["rule"] for group in data["groups"]]


def _of_ours(kind: type[Optimizer], data: Data, decode: Values) -> dict[str, Any]:
    variable, allowed = data["variable"]
    return {
        **{name: decode(data["own"][name]) for name in kind.OWN},
        "variable_attrs": VariableAttributes(list(map(str, variable)), list(map(str, allowed))),
        "ipu_state_is_dirty": False,
        "host_state_is_dirty": False,
        "_loaded_ipu_state": {},
    }


def _known() -> dict[str, type[torch.optim.Optimizer]]:
    candidates = [*vars(torch.optim).values(), *vars(ours).values()]
    kinds = [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)]
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds if kind is not torch.optim.Optimizer}


_KNOWN = _known()
