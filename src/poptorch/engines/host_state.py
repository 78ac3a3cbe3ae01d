"""From the tensors that a program is bound to, to those that its graph takes after the host passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from poptorch.engines.passes.prepare import PREPARE
from poptorch.executable import Program
from poptorch.ir import InputSpec, StepGraph
from poptorch.ir.python import as_function

Strides = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class HostState:
    """The state of a host graph: most of it is the program's, some is computed from it when it is bound."""

    given: tuple[str, ...]  # by the program, in this order
    taken: tuple[str, ...]  # by the host graph
    prepare: StepGraph | None = None  # what computes the rest

    @classmethod
    def of(cls, program: Program, graph: StepGraph) -> HostState:
        return cls(_names(program.state), _names(graph.signature.state), graph.graphs.get(PREPARE))

    @cached_property
    def _preparation(self) -> Callable[..., Any]:
        assert self.prepare is not None
        return as_function(self.prepare.ops, PREPARE)

    def arrange(self, state: Sequence[torch.Tensor], drawn: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What the host graph takes, from what the program is given and the memory of random numbers."""
        named = {**drawn, **{name: tensor.detach() for name, tensor in zip(self.given, state, strict=True)}}
        if self.prepare is not None:
            with torch.no_grad():
                results = self._preparation(*(named[name] for name in _names(self.prepare.signature.state)))
            named.update(zip((spec.name for spec in self.prepare.signature.outputs), results, strict=True))
        return [named[name] for name in self.taken]


def _names(specs: Sequence[InputSpec]) -> tuple[str, ...]:
    return tuple(spec.name for spec in specs)


def changed_strides(program: Program, graph: StepGraph) -> Strides:
    """The memory layout that a host graph wants for the state that must change its own."""
    parts = [graph, *([graph.graphs[PREPARE]] if PREPARE in graph.graphs else [])]
    wanted = {spec.name: spec.stride for part in parts for spec in part.signature.state}
    return {spec.name: wanted[spec.name] for spec in program.state if wanted.get(spec.name, spec.stride) != spec.stride}
