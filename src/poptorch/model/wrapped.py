"""Which modules are wrapped for training, and by whom."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from poptorch.errors import WrappedError, explain

_EXECUTORS = WeakIdKeyDictionary()  # module → weak reference to the executor that trains it


def remember(model: nn.Module, executor: Any) -> None:
    """An executor trains this module from now on."""
    _EXECUTORS[model] = weakref.ref(executor)


def forget(model: nn.Module, executor: Any) -> bool:
    """An executor trains this module no longer; tells whether it was the one that did."""
    reference = _EXECUTORS.get(model)
    if reference is None or reference() is not executor:
        return False
    del _EXECUTORS[model]
    return True


def is_training_wrapped(model: nn.Module) -> bool:
    """Whether a live executor trains this module."""
    reference = _EXECUTORS.get(model)
    return reference is not None and reference() is not None


def check_unwrapped(model: nn.Module) -> None:
    """Raise if the module is wrapped for training already."""
    if is_training_wrapped(model):
        raise WrappedError(
            explain(
                f"Model has already been wrapped: another training executor trains this {type(model).__name__}.",
                fix="call destroy() on that executor first",
            )
        )


class WorkingCopy:
    """The module that is compiled: the user's own for training, for inference a copy with the same parameters."""

    def __init__(self, original: nn.Module, *, is_own: bool) -> None:
        self.original = original
        self.module = original if is_own else copy.copy(original)
        self._then = dict(vars(original))

    def take_attributes(self) -> None:
        """Give the copy what was set on the original since it was made."""
        if self.module is not self.original:
            own = vars(self.module)
            for name, value in vars(self.original).items():
                if self._then.get(name) is not value and own.get(name) is self._then.get(name):
                    own[name] = value
