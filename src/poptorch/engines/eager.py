"""The eager engine: runs a program's ops one by one through PyTorch. Starts at once; the oracle for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from poptorch.engines.draws import give_generators
from poptorch.engines.engine import NOTHING_TO_WRITE, Kernel, Started
from poptorch.engines.host import Host, Observer, run_host_passes, unobserved
from poptorch.engines.host_state import HostState, Strides
from poptorch.engines.ops import returned_count, runnable_ops, written_positions
from poptorch.engines.passes.eager import EAGER
from poptorch.executable import Program
from poptorch.ir import StepGraph, runs_of
from poptorch.ir.control import draws_inside
from poptorch.ir.python import as_function


@dataclass(frozen=True)
class EagerEngine:
    name: str = "eager"

    def compile(self, programs: Sequence[Program], observe: Observer = unobserved) -> dict[str, Kernel]:
        return {program.name: self.compile_one(program, observe) for program in programs}

    def compile_one(self, program: Program, observe: Observer = unobserved) -> EagerKernel:
        graph = run_host_passes(program.graph, Host(fixed=program.fixed), EAGER, observe)
        return EagerKernel.of(program, graph, as_function(eager_ops(graph), program.name, eager_graphs(graph)))


def eager_ops(graph: StepGraph) -> fx.Graph:
    """The ops of a graph as PyTorch runs them one by one; they take generators after all other inputs."""
    ops = runnable_ops(graph)
    give_generators(ops)
    return ops


def eager_graphs(graph: StepGraph) -> dict[str, StepGraph]:
    """The graphs that ops of a graph run, in the same form; those of a node that draws take a generator as well."""
    drawing = {run.graph for node in graph.ops.nodes if draws_inside(node) for run in runs_of(node)}
    return {
        name: replace(
            inner, ops=eager_ops(inner) if name in drawing else runnable_ops(inner), graphs=eager_graphs(inner)
        )
        for name, inner in graph.graphs.items()
    }


@dataclass(frozen=True)
class EagerKernel:
    """A function that computes all results of a program, then one copy of the new values into place."""

    function: Callable[..., Any]
    state: HostState
    returned: int
    written: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, graph: StepGraph, function: Callable[..., Any]) -> EagerKernel:
        return cls(function, HostState.of(program, graph), returned_count(graph), written_positions(graph))

    @property
    def strides(self) -> Strides:
        return {}

    def bind(self, state: list[torch.Tensor], generators: Sequence[torch.Generator]) -> EagerRun:
        return EagerRun(self, self.state.arrange(state, {}), generators)


@dataclass(frozen=True)
class EagerRun:
    """A kernel with its state."""

    kernel: EagerKernel
    state: list[torch.Tensor]
    generators: Sequence[torch.Generator]
    writes_early = False

    def __call__(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        started = self.start(tensors)
        started.write()
        return started.outputs or ()

    def start(self, tensors: list[torch.Tensor]) -> Started:
        arguments = [*self.state, *tensors]
        results = self.kernel.function(*arguments, self.generators)
        return Started(
            copying(arguments, self.kernel.written, results, self.kernel.returned), results[: self.kernel.returned]
        )


def copying(
    arguments: Sequence[torch.Tensor], written: Sequence[int], results: Sequence[torch.Tensor], returned: int
) -> partial[Any]:
    """The call that brings new values, which come after the returned ones, to the arguments they belong to."""
    if not written:
        return NOTHING_TO_WRITE
    return partial(torch._foreach_copy_, [arguments[position] for position in written], list(results[returned:]))
