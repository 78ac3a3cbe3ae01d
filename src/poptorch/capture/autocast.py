"""Cast the operands of torch functions inside `poptorch.autocast()`, as the policy of the options says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from poptorch.autocasting import Policy
from poptorch.capture.context import is_autocasting
from poptorch.capture.mixed_types import MIXED, Arguments, Function, cast_all, spellings
from poptorch.capture.private import pytree


class Autocast:
    """A policy at work. `running` lists the modules that are inside their forward, the innermost last."""

    def __init__(self, policy: Policy | None, running: Sequence[nn.Module]) -> None:
        self._has_policy = policy is not None
        self._running = running
        self._functions: dict[Function, str] = {}
        self._modules: dict[type[nn.Module], str] = {}
        for rule in ("fp16", "fp32", "promote", "demote") if policy is not None else ():
            for target in getattr(policy, rule):
                if isinstance(target, type) and issubclass(target, nn.Module):
                    self._modules[target] = rule
                else:
                    self._functions.update(dict.fromkeys({target, *spellings([target.__name__])}, rule))

    def cast(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a torch function in the type that its rule asks for; as they are if it has none."""
        rule = self._rule(func) if self._has_policy and is_autocasting() else None
        if rule is None:
            return args, kwargs
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if rule in ("promote", "demote") and not {tensor.dtype for tensor in tensors} >= MIXED:
            return args, kwargs
        dtype = torch.float16 if rule in ("fp16", "demote") else torch.float32
        if func in _WRITING:
            return tuple(arg.to(dtype) if index == 0 else arg for index, arg in enumerate(args)), kwargs
        return cast_all(dtype, args, kwargs)

    def _rule(self, func: Function) -> str | None:
        """That of the innermost listed module, because it was chosen for this place; else that of the function."""
        if not _computes(func):
            return None
        for module in reversed(self._running):
            rule = next((self._modules[kind] for kind in type(module).__mro__ if kind in self._modules), None)
            if rule is not None:
                return rule
        return self._functions.get(func)


def _computes(func: Function) -> bool:
    """Whether a function computes new values: not one that reads an attribute, changes its operand or converts it."""
    name = getattr(func, "__name__", "")
    changes = name.endswith("_") and not name.endswith("__")
    return not changes and name not in _NOT_COMPUTING and not name.startswith("__i")


_WRITING = (F.batch_norm, F.instance_norm)  # they write into their statistics, which must not become copies
_NOT_COMPUTING = frozenset(
    {"__get__", "__set__", "__setitem__", "to", "type", "half", "float", "double", "detach", "requires_grad"}
)
