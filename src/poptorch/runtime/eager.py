"""The eager engine: runs a program's ops one by one through PyTorch. Starts at once; the oracle for the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from poptorch.executable import Program
from poptorch.runtime.engine import Call


@dataclass(frozen=True)
class EagerEngine:
    name: str = "eager"

    def compile(self, program: Program, fixed: Collection[str] = ()) -> EagerKernel:
        ops = program.functional_ops()
        for node in ops.graph.nodes:
            if node.target is torch.ops.aten.bernoulli.p:
                node.target = _bernoulli
        ops.recompile()
        return EagerKernel(ops.forward, len(program.returned), len(program.state), program.written_positions)


def _bernoulli(tensor: torch.Tensor, p: float) -> torch.Tensor:
    """Draws in the order of the tensor's memory, as the in-place op of the user's code does."""
    return torch.empty_like(tensor).bernoulli_(p)


@dataclass(frozen=True)
class EagerKernel:
    """The generated Python of an FX graph, then one copy of all new values into place."""

    function: Callable[..., Any]
    returned: int
    state_count: int
    written: tuple[int, ...]

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
