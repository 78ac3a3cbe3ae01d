"""A program: one graph, and what is known about how it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from poptorch.ir import Guard, InputSpec, OutputRole, OutputSpec, Signature, StepGraph


@dataclass(frozen=True)
class Program:
    """One graph, and what an engine and its caller need to know about its inputs and outputs.

    A program is called with its state (bound once) followed by the user's tensors. It writes new values of its
    inputs in place and returns the rest: the user's outputs and, if there are guards, one boolean vector.
    """

    graph: StepGraph
    reads_fixed_state: bool = False  # nobody but the program itself changes its state while it is bound

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def signature(self) -> Signature:
        return self.graph.signature

    @property
    def state(self) -> tuple[InputSpec, ...]:
        return self.signature.state

    @property
    def returned(self) -> tuple[OutputSpec, ...]:
        handed_out = (OutputRole.USER_OUTPUT, OutputRole.ANCHOR, OutputRole.GUARD, OutputRole.BOUNDARY)
        return tuple(spec for spec in self.signature.outputs if spec.role in handed_out)

    @property
    def guards(self) -> tuple[Guard, ...]:
        return self.graph.guards

    @property
    def draws_random_numbers(self) -> bool:
        return self.graph.draws_random_numbers

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        return self.graph.constants

    @property
    def written_state(self) -> tuple[str, ...]:
        """The names of the state that the program changes, in the order of its inputs."""
        return tuple(spec.name for spec in self.state if spec.name in self.signature.written)

    @property
    def written_positions(self) -> tuple[int, ...]:
        """For each new value that the graph computes, the position of the input that it goes to."""
        positions = {spec.name: index for index, spec in enumerate(self.signature.inputs)}
        return tuple(positions[spec.name] for spec in self.signature.outputs if spec.role is OutputRole.NEW_VALUE)

    @property
    def fixed(self) -> frozenset[str]:
        """The names of the state that nobody changes while the program is bound to it."""
        return frozenset(spec.name for spec in self.state) - self.signature.written if self.reads_fixed_state else _NONE


_NONE: frozenset[str] = frozenset()
