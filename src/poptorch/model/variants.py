"""The programs of one executor, one for each kind of call it has seen, and why each was compiled."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from poptorch.errors import ArgumentError
from poptorch.model.arguments import CallSpec
from poptorch.model.modes import Flags, ModuleWatch
from poptorch.model.program_state import ProgramState
from poptorch.runtime import RunTrace, Session


@dataclass(eq=False)
class Variant:
    """A compiled program with the kind of call and the mode of the submodules that it is for."""

    call: CallSpec
    flags: Flags
    watch: ModuleWatch
    session: Session
    state: ProgramState
    reason: str
    seconds: float
    is_outdated: bool = False  # whether the optimiser asks for another program
    trace: RunTrace | None = None  # of the last call that ended well
    anchored: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # by that call

    def bind(self) -> None:
        """Let the session work on the tensors that their owners have now."""
        self.session.bind(self.state.tensors())
        self.state.confirm()

    def refresh(self, names: Collection[str] | None = None) -> None:
        """Let the session work with the values that the owners have now: of everything, or only of these buffers."""
        self.state.refresh(self.watch, names)
        self.bind()


class Variants:
    """All compiled programs of an executor, in the order in which they were compiled."""

    def __init__(self) -> None:
        self._compiled: list[Variant] = []

    def add(self, variant: Variant) -> None:
        self._compiled.append(variant)

    def remove(self, variant: Variant) -> None:
        self._compiled.remove(variant)

    def find(self, flags: Flags, args: tuple[Any, ...], kwargs: dict[str, Any], *, exact: bool) -> Variant | None:
        """The program for these flags; if `exact`, also for these arguments."""
        for variant in self._compiled:
            is_usable = variant.flags == flags and not variant.is_outdated
            if is_usable and (not exact or _takes(variant.call, args, kwargs)):
                return variant
        return None

    def drop_outdated(self) -> None:
        self._compiled = [variant for variant in self._compiled if not variant.is_outdated]

    def report(self) -> str:
        """One line per program: what it is for, how long it took to compile, and why it was compiled."""
        rows = [
            f"{number}. {variant.call} in {variant.seconds:.2f} s: {variant.reason}"
            for number, variant in enumerate(self._compiled, start=1)
        ]
        return "\n".join([f"{len(rows)} program(s) compiled", *rows])

    def __iter__(self) -> Iterator[Variant]:
        return iter(self._compiled)

    def __len__(self) -> int:
        return len(self._compiled)


def _takes(call: CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        call.tensors(args, kwargs)
    except ArgumentError:
        return False
    return True
