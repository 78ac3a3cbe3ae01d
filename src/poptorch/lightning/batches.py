"""A batch as the arguments of a program, and as a step sees it while the program is captured.

Tensors are arguments under the name of their place. A number is a tensor with one element per micro-batch, because it
changes from batch to batch. Strings stay on the host: a step can return them, and what it reads of them is noted.
Whatever else is there, such as None, is a constant that every batch must have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from poptorch.lightning import nested

NAME = "batch"


def arguments(batch: Any, micro_batches: int) -> dict[str, Any]:
    """The arguments of a program for this batch, by name."""
    found: dict[str, Any] = {}
    for name, leaf in nested.leaves(batch, NAME):
        if _is_number(leaf):
            found[name] = torch.full((micro_batches,), leaf)
        elif isinstance(leaf, torch.Tensor) and leaf.is_inference():
            found[name] = leaf.clone()  # which a step may write to
        elif not isinstance(leaf, str):
            found[name] = leaf
    return found


def inside(batch: Any, given: Mapping[str, Any], note: Callable[[str, str], None]) -> Any:
    """The batch that a step sees: made of the arguments that the program was given, and strings that tell `note`."""

    def leaf_inside(name: str, leaf: Any) -> Any:
        if isinstance(leaf, str):
            return HostText.of(leaf, name, note)
        return given[name].reshape(()) if _is_number(leaf) else given[name]

    return nested.mapped(batch, leaf_inside, NAME)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (int, float)) and not isinstance(leaf, bool)


class HostText(str):
    """A string of a batch that tells when something is done with it."""

    place: str
    note: Callable[[str, str], None]

    @classmethod
    def of(cls, text: str, place: str, note: Callable[[str, str], None]) -> HostText:
        self = cls(text)
        vars(self).update(place=place, note=note)
        return self


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    def noting(self: HostText, *args: Any) -> Any:
        attributes = object.__getattribute__(self, "__dict__")
        if attributes:
            attributes["note"](attributes["place"], str.__str__(self))
        return method(self, *args)

    return noting


def _getattribute(self: HostText, name: str) -> Any:
    if name in ("__dict__", "__class__", "place", "note"):
        return object.__getattribute__(self, name)
    return _noting(str.__getattribute__)(self, name)


def _radd(self: HostText, other: str) -> str:
    return other + str.__str__(self)


_READS = ("eq", "ne", "hash", "str", "repr", "format", "len", "contains", "getitem", "iter", "add", "mod", "lt", "gt")
for _name in _READS:
    setattr(HostText, f"__{_name}__", _noting(getattr(str, f"__{_name}__")))
HostText.__radd__ = _noting(_radd)  # pyright: ignore[reportAttributeAccessIssue]
HostText.__int__ = _noting(lambda self: int(str.__str__(self)))  # pyright: ignore[reportAttributeAccessIssue]
HostText.__float__ = _noting(lambda self: float(str.__str__(self)))  # pyright: ignore[reportAttributeAccessIssue]
HostText.__getattribute__ = _getattribute  # pyright: ignore[reportAttributeAccessIssue]
