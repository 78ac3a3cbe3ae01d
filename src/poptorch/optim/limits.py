"""Which values the numbers of an optimiser may have.

Torch checks them once, in the constructor. A model reads them from `param_groups`, again and again, so the same limits
hold here however a number got there: by hand, by a schedule or from a file.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import torch

from poptorch.errors import OptimizerError, explain
from poptorch.optim.host_step import IMPLEMENTATION, is_torchs

_POSITIVE = ("velocity_scaling", "loss_scaling")
_MAY_BE_INFINITE = ("max_weight_norm", "t0", "step_sizes.1")
_MAY_BE_NEGATIVE = ("beta2_decay",)
_ALIKE_EVERYWHERE = ("lr", "weight_decay", "eps")  # they mean the same in an optimiser that we know nothing about


def check_number(name: str, number: float, where: str) -> None:
    """Raise if a number is out of the range that numbers of its name have."""
    limit = ""
    if not _is_usable(name, number):
        limit = "must be finite"
    elif name in _POSITIVE and number <= 0:
        limit = "must be positive"
    elif number < 0 and name not in _MAY_BE_NEGATIVE:
        limit = "cannot be negative"
    if limit:
        raise OptimizerError(explain(f"{name} of {where} is {number:g}, and {limit}.", fix="choose another value"))


def check_types(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], where: str) -> None:
    """Raise if an entry of a group is no number, or no tuple of numbers, where its torch class has one."""
    known = _defaults(_torch_parent(type(optimizer)))
    for name, value in group.items():
        if name in known:
            _check_type(name, value, known[name], where)


def check_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], where: str) -> None:
    """Raise unless the constructor of the optimiser's torch class would take the entries of a group."""
    check_types(optimizer, group, where)
    parent = _torch_parent(type(optimizer))
    settings = tuple((name, group[name]) for name in _defaults(parent) if name in group)
    try:
        construct = _construct if all(not isinstance(v, (torch.Tensor, list)) for _, v in settings) else _construct_new
        construct(parent, settings)
    except Exception as error:
        raise OptimizerError(
            explain(f"{where} of {type(optimizer).__name__} cannot be: {error}", fix="choose another value")
        ) from error


def check_captured(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], found: Mapping[str, float], where: str
) -> None:
    """Raise if a step that is captured has a number that it cannot use; `found` are the numbers of its group."""
    for name in _ALIKE_EVERYWHERE:
        if isinstance(group.get(name), (str, complex, list)):
            _check_type(name, group[name], 0.0, where)
    has_parent = _torch_parent(type(optimizer)) is not torch.optim.Optimizer
    for name, number in found.items():
        if name in _ALIKE_EVERYWHERE:
            check_number(name, number, where)
        elif math.isnan(number) or (has_parent and not _is_usable(name, number)):
            raise OptimizerError(
                explain(f"{name} of {where} is {number:g}, and must be finite.", fix="choose another value")
            )
    check_group(optimizer, group, where)


def _is_usable(name: str, number: float) -> bool:
    return math.isfinite(number) or (number == math.inf and name in _MAY_BE_INFINITE)


def _torch_parent(kind: type) -> type:
    """The class of torch's that an optimiser is or derives from; `Optimizer` itself takes anything."""
    return next(base for base in kind.__mro__ if is_torchs(base))


@cache
def _defaults(parent: type) -> dict[str, Any]:
    """What the constructor of a torch class takes, with the values of what is not given."""
    if parent is torch.optim.Optimizer:
        return {}
    parameters = inspect.signature(parent).parameters.items()
    return {name: each.default for name, each in parameters if name not in ("params", *IMPLEMENTATION)}


def _construct_new(parent: type, settings: tuple[tuple[str, Any], ...]) -> None:
    if settings:
        parent([torch.empty(1, 1)], **dict(settings))


_construct = lru_cache(maxsize=64)(_construct_new)  # most groups are alike, and most steps change nothing


def _check_type(name: str, value: Any, usual: Any, where: str) -> None:
    wanted = ""
    if isinstance(usual, tuple):
        is_long = isinstance(value, (tuple, list)) and len(value) == len(usual)
        if not is_long or not all(_fits(item, known) for item, known in zip(value, usual, strict=True)):
            wanted = f"a tuple of {len(usual)} numbers"
    elif not isinstance(usual, (bool, str, type(None))) and not _fits(value, usual):
        wanted = "a number"
    if wanted:
        raise OptimizerError(explain(f"{name} of {where} is {value!r}, not {wanted}.", fix=f"set {name} to {wanted}"))


def _fits(value: Any, usual: Any) -> bool:
    if value is None:
        return usual is None
    return isinstance(value, numbers.Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
