"""Train and eval: the mode that a program is compiled for, apart from the flags of the module.

An executor has a mode of its own once `train()` or `eval()` was called on it; before that, it takes the flags that the
module has when it compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, getitem, is_
from typing import TypeVar

import torch
from torch import nn

from poptorch.errors import explain
from poptorch.interrupts import run_and_undo

Flags = tuple[bool, ...]  # `training` of every submodule, in the order of `module.modules()`
T = TypeVar("T")
_flag = attrgetter("training")


def flags_of(module: nn.Module) -> Flags:
    """The flags that the submodules have now."""
    return tuple(map(_flag, module.modules()))


def flags_in_mode(module: nn.Module, mode: bool) -> Flags:
    """The flags that `module.train(mode)` would give the submodules; it is called only if one has its own `train`."""
    submodules = list(module.modules())
    if all(type(submodule).train is nn.Module.train for submodule in submodules):
        return (mode,) * len(submodules)
    before = [(submodule, dict(submodule.__dict__)) for submodule in submodules]

    def ask() -> Flags:
        module.train(mode)
        return flags_of(module)

    def undo() -> None:
        for submodule, attributes in before:
            submodule.__dict__.update(attributes)

    return run_and_undo(ask, undo)


def run_with_flags(module: nn.Module, flags: Flags, body: Callable[[], T]) -> T:
    """Run a function while the submodules have these flags."""
    submodules, before = list(module.modules()), flags_of(module)

    def change() -> T:
        _set_flags(submodules, flags)
        return body()

    return run_and_undo(change, lambda: _set_flags(submodules, before))


def _set_flags(submodules: list[nn.Module], flags: Flags) -> None:
    for submodule, flag in zip(submodules, flags, strict=True):
        if submodule.training != flag:
            submodule.training = flag


class ModuleWatch:
    """What a program has taken over from a module for good: the flags of its submodules, and which these are.

    Every call asks whether they are as before, so they are kept in columns that compare without a line of Python each.
    """

    def __init__(self, module: nn.Module) -> None:
        named = dict(module.named_modules())
        self._names = list(named)
        self._modules = list(named.values())
        self._flags = list(map(_flag, self._modules))
        owners = [m for m in self._modules if not isinstance(m, torch.jit.ScriptModule)]
        pairs = [(owner, name) for owner in owners for name in owner._modules]
        self._tables = [owner._modules for owner, _ in pairs]
        self._keys = [name for _, name in pairs]
        self._children = [owner._modules[name] for owner, name in pairs]

    def switched(self) -> list[str]:
        """The submodules whose flag has changed."""
        now = list(map(_flag, self._modules))
        if now == self._flags:
            return []
        changes = zip(self._names, self._flags, now, strict=True)
        return [name or "the model itself" for name, before, after in changes if before != after]

    def replaced(self) -> list[str]:
        """The submodules in whose place there is something else now."""
        try:
            if all(map(is_, map(getitem, self._tables, self._keys), self._children)):
                return []
        except KeyError:
            pass
        places = zip(self._tables, self._keys, self._children, strict=True)
        return [key for table, key, child in places if table.get(key) is not child]


def switched_warning(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return explain(
        f"train() or eval() was called on the module after it was compiled: {shown}.",
        effect="none: the program keeps the mode that it was compiled for",
        fix="call train() or eval() on what trainingModel or inferenceModel returned, which has a mode of its own; "
        "or call destroy() to compile again",
    )


def replaced_error(names: list[str]) -> str:
    return explain(
        f"the submodule {', '.join(names)} was replaced or removed after the model was compiled.",
        reason="the program computes with the submodules that it was compiled with",
        fix="put it back, or call destroy() to compile again",
    )
