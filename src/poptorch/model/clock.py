"""How an inference executor learns that a training executor has changed the weights they share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class Clock:
    """Counts the training calls that changed a set of parameters."""

    def __init__(self) -> None:
        self.time = 0


_CLOCKS = WeakIdKeyDictionary()  # parameter → its clock, for as long as the parameter lives


def clocks_of(parameters: Iterable[torch.Tensor]) -> list[Clock]:
    """The distinct clocks of some parameters; those that have none yet get a common new one."""
    fresh = Clock()
    found: list[Clock] = [_CLOCKS.setdefault(parameter, fresh) for parameter in parameters]  # pyright: ignore
    return list(dict.fromkeys(found))


def exchange(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give a tensor the contents of another one, whatever their devices; its object and its clock stay.

    Raises RuntimeError if something else holds on to the tensor.
    """
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    vars(other).update(vars(tensor))
    clock = _CLOCKS.pop(tensor, None)  # a weak reference, which PyTorch does not allow here
    try:
        torch.utils.swap_tensors(tensor, other)
    finally:
        if clock is not None:
            _CLOCKS[tensor] = clock
