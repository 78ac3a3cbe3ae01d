"""Print a module with the hooks that run before its layers, such as the blocks that annotate them."""

from __future__ import annotations

import builtins
import textwrap
from typing import Any

from torch import nn


def module_repr(m: nn.Module) -> str:
    """The text of a module as PyTorch gives it, with the forward pre-hooks of each layer in front of the layer.

    >>> import poptorch, torch
    >>> builtins.print(poptorch.module_repr(torch.nn.Linear(2, 1)))
    Linear(in_features=2, out_features=1, bias=True)
    """
    hooks = "".join(f"{hook!r} " for hook in m._forward_pre_hooks.values())
    extra = m.extra_repr()
    children = [f"({name}): {textwrap.indent(module_repr(child), '  ').lstrip()}" for name, child in m.named_children()]
    if not children:
        return f"{hooks}{m._get_name()}({extra})"
    lines = [*extra.splitlines(), *children]
    return f"{hooks}{m._get_name()}(\n" + "\n".join(f"  {line}" for line in lines) + "\n)"


def print(*objects: Any, **how: Any) -> None:
    """Like Python's `print`; a module is printed with its hooks first, and then as PyTorch prints it."""
    for item in objects:
        if isinstance(item, nn.Module):
            builtins.print(module_repr(item), **how)
    builtins.print(*objects, **how)
