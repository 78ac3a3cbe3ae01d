"""Python values that become part of a program, remembered so that it is noticed when they change.

A number, a string or a tensor that is no buffer, in an attribute of a module, is read once: while a step is compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str)
_MOST_VALUES = 1000  # in a container
_OTHERS = ("training", "_current_fx_name")  # which train() and Lightning change


@dataclass(frozen=True)
class Constant:
    """A value as it was, and for a tensor how often it had been written to."""

    value: Any
    version: int | None

    def holds(self, now: Any) -> bool:
        """Whether the value is the same now."""
        if self.version is not None:
            return now is self.value and now._version == self.version
        return now is self.value or (type(now) is type(self.value) and now == self.value)

    def change(self, name: str, now: Any) -> str:
        """What has happened, and what can be done about it."""
        if self.version is None:
            what = f"{name}, which it reads, was {self.value!r} and is {now!r} now."
        else:
            what = f"the tensor {name}, which it reads, has changed."
        return f"{what} Values of buffers may change: make it one with register_buffer to avoid this."


def remember(name: str, value: Any) -> Constant | None:
    """The constant that an attribute of a module is; None if it is none, or changes for other reasons."""
    if name in _OTHERS:
        return None
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else Constant(value, value._version)
    if type(value) in _PLAIN:
        return Constant(value, None)
    if isinstance(value, (list, tuple, dict)) and 0 < _count(value) <= _MOST_VALUES:
        return Constant(copy.deepcopy(value), None)
    return None


def _count(value: Any) -> float:
    """How many values a container holds; infinitely many if one of them is not plain."""
    if isinstance(value, (list, tuple, dict)):
        inner = value.values() if isinstance(value, dict) else value
        return sum(map(_count, inner)) if len(value) <= _MOST_VALUES else float("inf")
    return 1 if value is None or type(value) in _PLAIN else float("inf")


class Submodules:
    """The plain values and tensors in attributes of the submodules of a module, as a program was compiled with them.

    Whether it uses them is not known, so they are looked at once per epoch only.
    """

    def __init__(self, module: nn.Module, *, without: Callable[[nn.Module], bool]) -> None:
        self._found: list[tuple[str, dict[str, Any], str, Constant]] = []
        for path, inner in module.named_modules():
            if inner is module or without(inner):
                continue
            for name, value in vars(inner).items():
                constant = remember(name, value) if isinstance(value, (*_PLAIN, torch.Tensor)) else None
                if constant is not None:
                    self._found.append((f"self.{path}.{name}", vars(inner), name, constant))

    def change(self) -> str | None:
        """What has changed, if something has."""
        for path, attributes, name, constant in self._found:
            if name in attributes and not constant.holds(attributes[name]):
                return constant.change(path, attributes[name])
        return None
