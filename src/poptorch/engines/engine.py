"""The protocol that separates engines from everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from poptorch.engines.host import Observer
from poptorch.executable import Program


class Started(NamedTuple):
    """A run of a program up to the point where it writes: `write` does the rest, and is one call of C code.

    `outputs` is None if they are only known afterwards; then they are the last item of what `write` gives.
    """

    write: partial[Any]
    outputs: Sequence[torch.Tensor] | None


NOTHING_TO_WRITE = partial(int)
_call = partial.__call__


def finish(started: Sequence[Started], *marks: partial[Any]) -> Sequence[torch.Tensor]:
    """Let all of these runs write, then execute the marks; gives the outputs of the first.

    Python looks for signals between its own instructions only. There is none from the first write to the last mark, so
    an interrupt finds all of them done or nothing, and a mark tells which.
    """
    calls = [run.write for run in started]
    calls += marks
    done = list(map(_call, calls))
    outputs = started[0].outputs
    return done[0][-1] if outputs is None else outputs


class Bound(Protocol):
    """A program together with its state and its random numbers."""

    @property
    def writes_early(self) -> bool:
        """Whether it changes state while it computes, so that an error on the way leaves a part of the changes."""
        ...

    def __call__(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run it on these tensors of the user; an interrupt finds all of its writes done, or none."""
        ...

    def start(self, tensors: list[torch.Tensor]) -> Started:
        """Run it on these tensors of the user, up to the point where it changes anything."""
        ...


class Kernel(Protocol):
    """A program that an engine has made ready to run."""

    @property
    def strides(self) -> Mapping[str, tuple[int, ...]]:
        """The memory layout that the kernel was built for, for the state that must change its own."""
        ...

    def bind(self, state: list[torch.Tensor], generators: Sequence[torch.Generator]) -> Bound:
        """The program on these state tensors, which it changes in place; each replica has its generator."""
        ...


class Engine(Protocol):
    """A way to run programs."""

    @property
    def name(self) -> str: ...

    def compile(self, programs: Sequence[Program], observe: Observer = ...) -> dict[str, Kernel]:
        """Make the programs of one executable ready to run; gives each under its name.

        The observer sees the graph of each program after every host pass.
        """
        ...
