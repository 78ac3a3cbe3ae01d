"""The protocol that separates engines from everything else, and how one is chosen."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch

from poptorch import environment
from poptorch._logging import warn_once
from poptorch.errors import Error
from poptorch.executable import Program

Call = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class Kernel(Protocol):
    """A program that an engine has made ready to run."""

    @property
    def strides(self) -> Mapping[str, tuple[int, ...]]:
        """The memory layout that the kernel was built for, for the state that must change its own."""
        ...

    def bind(self, state: list[torch.Tensor]) -> Call:
        """A function of the user's tensors that works on these state tensors, in place, and returns the outputs."""
        ...


class Engine(Protocol):
    """A way to run programs."""

    @property
    def name(self) -> str: ...

    def compile(self, program: Program, fixed: Collection[str] = ()) -> Kernel:
        """Make a program ready to run; `fixed` is the state whose layout an earlier program of the same has changed."""
        ...


ENGINES = ("inductor", "eager")


def choose_engine(requested: str | None) -> Engine:
    """The engine that the options, the environment or the machine ask for, in this order."""
    name = requested or environment.ENGINE.read()
    if name and name not in ENGINES:
        raise Error(f"{environment.ENGINE.name} is {name!r}, but the engines are {' and '.join(map(repr, ENGINES))}.")
    if not name and not has_compiler():
        warn_once(
            "no C++ compiler was found: models run on the eager engine, which is slower. "
            "Install g++ (for example `apt-get install g++`) and run again for native code."
        )
        name = "eager"
    if name == "eager":
        from poptorch.runtime.eager import EagerEngine

        return EagerEngine()
    from poptorch.runtime.inductor import InductorEngine  # takes more than a second, so only when it is used

    return InductorEngine()


def has_compiler() -> bool:
    """Whether there is a C++ compiler for the inductor engine to call."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++"))
