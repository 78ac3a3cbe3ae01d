"""Which numbers of an optimiser are constants of the program and which may change, and what a user added later."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from poptorch._logging import logger
from poptorch.errors import OptimizerError, explain


class Constness(Enum):
    """What an optimiser says about one of its numbers."""

    VARIABLE = auto()
    CONSTANT = auto()
    UNDECLARED = auto()  # a torch optimiser's number that has its usual value: counts as constant, but may change


@dataclass(frozen=True)
class Attribute:
    """One number of an optimiser, and whether it may change after compilation."""

    value: float
    constness: Constness = Constness.VARIABLE

    @property
    def is_constant(self) -> bool:
        return self.constness is not Constness.VARIABLE

    @property
    def is_zero(self) -> bool:
        """Whether it is zero and stays so, which lets the program leave out what it would multiply."""
        return self.value == 0 and self.is_constant

    def __str__(self) -> str:
        return f"{self.value:.9g}{' (const)' if self.is_constant else ''}"


def check_replacement(where: str, compiled: Attribute, now: Attribute) -> None:
    """Raise if a program that was compiled for one attribute cannot go on with another."""
    if Constness.UNDECLARED not in (compiled.constness, now.constness) and compiled.constness is not now.constness:
        first, second = ("constant", "non constant") if compiled.is_constant else ("non constant", "constant")
        raise OptimizerError(
            explain(
                f"Can not replace a {first} value with a {second} value: {where}.",
                fix="before compiling, give the attribute to the constructor or call variable_attrs.markAsVariable; "
                "or call destroy() and compile again",
            )
        )
    if compiled.constness is Constness.CONSTANT and compiled.value != now.value:
        raise OptimizerError(
            explain(
                f"Values are constant but do not match: {where} was compiled as {compiled.value:.9g} "
                f"and is {now.value:.9g} now.",
                fix="before compiling, give the attribute to the constructor or call variable_attrs.markAsVariable; "
                "or call destroy() and compile again",
            )
        )


class VariableAttributes:
    """Which attributes of an optimiser may change after compilation; every other one is a constant.

    >>> import poptorch, torch
    >>> optimizer = poptorch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> optimizer.variable_attrs.isConstant("lr"), optimizer.variable_attrs.isConstant("momentum")
    (False, True)
    """

    def __init__(self, variable_attributes: list[str], allowed_attributes: list[str]) -> None:
        self._variable = list(variable_attributes)
        self._allowed_attributes = list(allowed_attributes)

    def isConstant(self, attr: str) -> bool:
        """Whether the attribute was not marked as variable."""
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        """Compile the attribute into the program: changing it later is an error."""
        self._check(attr)
        self._variable = [name for name in self._variable if name != attr]

    def markAsVariable(self, attr: str) -> None:
        """Let the attribute change after compilation, with `setOptimizer`."""
        self._check(attr)
        if attr not in self._variable:
            self._variable.append(attr)

    def _check(self, attr: str) -> None:
        if attr not in self._allowed_attributes:
            raise OptimizerError(
                explain(
                    f"Unknown attribute {attr!r}.", fix=f"choose from {', '.join(sorted(self._allowed_attributes))}"
                )
            )


class AttributeWatch:
    """Notices attributes that appear on an optimiser after it was first used, because nothing will read them."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] | None = None
        self._reported: set[str] = set()

    def look(self, optimizer: torch.optim.Optimizer, *, quietly: bool = False) -> None:
        """Remember the names of the first look; report each name that is new in a later one, once."""
        groups = [set(group) for group in optimizer.param_groups]
        found = {
            "optimizer attribute": {name for name in vars(optimizer) if not name.startswith("_")},
            "default group variable": set(optimizer.defaults),
        }
        if self._known is None:
            self._known = {**found, "group": set[str]().union(*groups)}
            return
        for index, names in enumerate(groups):
            self._report(f"group {index} attribute", names - self._known["group"], quietly)
        for kind, names in found.items():
            self._report(kind, names - self._known[kind], quietly)

    def _report(self, what: str, names: set[str], quietly: bool) -> None:
        if not names:
            return
        message = f"Ignoring unexpected {what}: {', '.join(sorted(names))}"
        if message not in self._reported:
            self._reported.add(message)
            log: Any = logger.debug if quietly else logger.warning
            log("%s", message)
