"""Know the tensors of a module wherever `forward` comes across them.

A module may keep a parameter or buffer in a list, a closure, a `functools.partial` or an object of its own, as it is or
as a view. All of these mean the tensor that the module has registered, so its stand-in takes their place in a trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from poptorch.capture.proxies import is_outside
from poptorch.capture.source import current_user_line
from poptorch.capture.views import same_view
from poptorch.errors import CompileError, explain


class Residents:
    """The parameters and buffers of a module, and what stands for each of them."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        self._by_memory: defaultdict[int, list[tuple[str, torch.Tensor, torch.Tensor]]] = defaultdict(list)

    def add(self, name: str, tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
        """From now on this stand-in is what the tensor means."""
        self._by_id[id(tensor)] = (name, tensor, stand_in)
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
            self._by_memory[tensor.untyped_storage().data_ptr()].append((name, tensor, stand_in))

    def adapt(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a function with stand-ins for what belongs to the module."""
        return self.replace(args), self.replace(kwargs)

    def replace(self, value: Any) -> Any:
        """An argument of a function, with stand-ins for what belongs to the module; raises for what cannot have one."""
        if isinstance(value, torch.Tensor):
            if not is_outside(value):
                return value
            stand_in = self.stand_in(value)
            if stand_in is None:
                self._refuse_computed(value)
            return value if stand_in is None else stand_in
        if type(value) in (list, tuple):
            replaced = [self.replace(item) for item in value]
            return type(value)(replaced) if any(map(_differ, replaced, value)) else value
        if type(value) is dict:
            return {key: self.replace(item) for key, item in value.items()}
        return value

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What stands for a tensor that is one of the module's, or shows the memory of one."""
        found = self._by_id.get(id(tensor))
        if found is not None:
            return found[2]
        if tensor.layout is not torch.strided or not tensor.numel() or tensor._is_zerotensor():
            return None
        sharing = self._by_memory.get(tensor.untyped_storage().data_ptr(), [])
        for _, owner, stand_in in sharing:
            view = same_view(tensor, owner, stand_in)
            if view is not None:
                return view
        if sharing:
            raise _not_replaceable(tensor, [name for name, _, _ in sharing])
        return None

    def _refuse_computed(self, tensor: torch.Tensor) -> None:
        """Raise for a tensor that was computed from a parameter before `forward`: its history is not in the trace."""
        if tensor.grad_fn is not None:
            names = [self._by_id[id(leaf)][0] for leaf in _leaves(tensor) if id(leaf) in self._by_id]
            if names:
                raise CompileError(
                    explain(
                        f"forward uses a tensor of shape {list(tensor.shape)} that was computed from "
                        f"{', '.join(sorted(names))} before: no gradient can reach it, and it would never change.",
                        where=str(current_user_line()),
                        fix="compute it in forward, or detach() it if it is meant to be a constant",
                    )
                )


def _differ(a: object, b: object) -> bool:
    return a is not b


def _leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor was computed from, as far as autograd knows."""
    found: list[torch.Tensor] = []
    waiting, seen = [tensor.grad_fn], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [function for function, _ in node.next_functions]
    return found


def _not_replaceable(tensor: torch.Tensor, names: list[str]) -> CompileError:
    return CompileError(
        explain(
            f"forward uses a tensor of {tensor.dtype} and shape {list(tensor.shape)} that shares memory with "
            f"{', '.join(names)} but is not a plain view of it.",
            where=str(current_user_line()),
            fix="make the view in forward, from the registered parameter or buffer",
        )
    )
