"""How an inference executor learns that a training executor has changed the weights they share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
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
