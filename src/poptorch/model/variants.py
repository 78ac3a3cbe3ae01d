"""The programs of one executor, one for each kind of call it has seen, and why each was compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from poptorch.errors import ArgumentError
from poptorch.model.arguments import CallSpec
from poptorch.model.state import OwnedState, Snapshot
from poptorch.runtime import Session


@dataclass(frozen=True)
class Variant:
    """A compiled program with the call that it is for."""

    call: CallSpec
    session: Session
    state: OwnedState | Snapshot
    reason: str
    seconds: float


class Variants:
    """All compiled programs of an executor, in the order in which they were compiled."""

    def __init__(self) -> None:
        self._compiled: list[Variant] = []

    def add(self, variant: Variant) -> None:
        self._compiled.append(variant)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Variant, list[torch.Tensor]] | None:
        """The program for these arguments, with their tensors."""
        for variant in self._compiled:
            try:
                return variant, variant.call.tensors(args, kwargs)
            except ArgumentError:
                continue
        return None

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
