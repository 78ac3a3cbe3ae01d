"""The eager engine: runs a program's ops one by one through PyTorch. Starts at once; the oracle for the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from poptorch.executable import Program
from poptorch.runtime.engine import Call


@dataclass(frozen=True)
class EagerEngine:
    name: str = "eager"

    def compile(self, program: Program, fixed: Collection[str] = ()) -> EagerKernel:
        return EagerKernel.of(program, eager_ops(program).forward)


def eager_ops(program: Program) -> fx.GraphModule:
    """The ops of a program as PyTorch runs them one by one."""
    ops = program.functional_ops()
    drawing = [node for node in ops.graph.nodes if node.target is torch.ops.aten.bernoulli.p]
    for node in drawing:
        node.target = _bernoulli
    if drawing:
        ops.recompile()
    return ops


def _bernoulli(tensor: torch.Tensor, p: float) -> torch.Tensor:
    """Draws in the order of the tensor's memory, as the in-place op of the user's code does."""
    return torch.empty_like(tensor).bernoulli_(p)


@dataclass(frozen=True)
class EagerKernel:
    """A function that computes all results of a program, then one copy of the new values into place."""

    function: Callable[..., Any]
    returned: int
    written: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, function: Callable[..., Any]) -> EagerKernel:
        return cls(function, len(program.returned), program.written_positions)

    @property
    def strides(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def bind(self, state: list[torch.Tensor]) -> Call:
        plain = [tensor.detach() for tensor in state]

        def call(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            arguments = [*plain, *tensors]
            results = self.function(*arguments)
            if self.written:  # in one call, so that an interrupt finds all of it done or nothing
                torch._foreach_copy_([arguments[i] for i in self.written], list(results[self.returned :]))
            return results[: self.returned]

        return call
