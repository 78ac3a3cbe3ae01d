"""Which modules are wrapped for training, and by whom."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
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


def take_attributes(copy: nn.Module, original: nn.Module, then: Mapping[str, Any]) -> None:
    """Give the copy that an inference model works with what was set on the original since it had these attributes."""
    if copy is not original:
        own = vars(copy)
        for name, value in vars(original).items():
            if then.get(name) is not value and own.get(name) is then.get(name):
                own[name] = value
