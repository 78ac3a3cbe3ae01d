"""Methods that a module has while it is wrapped for training: `destroy` and `copyWeightsToHostIfNeeded`.

They are attributes of the module object, so its class stays the user's. Deep copies and pickles of the module hold None
in their place: they are not wrapped, and whoever loads them needs no poptorch.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

_NAMES = ("destroy", "copyWeightsToHostIfNeeded")


class Handle:
    """Calls a method of an executor as long as that is alive."""

    def __init__(self, executor: Any, name: str) -> None:
        self._executor, self._name = weakref.ref(executor), name

    def __call__(self) -> Any:
        executor = self._executor()
        return False if executor is None else getattr(executor, self._name)()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def attach(model: nn.Module, executor: Any) -> None:
    """Give the module its handles, unless the user gave it something of that name."""
    for name in _NAMES:
        if isinstance(getattr(model, name, None), (Handle, type(None))):
            setattr(model, name, Handle(executor, name))


def detach(model: nn.Module) -> None:
    """Take the handles away again."""
    for name in _NAMES:
        if isinstance(vars(model).get(name), Handle):
            delattr(model, name)
