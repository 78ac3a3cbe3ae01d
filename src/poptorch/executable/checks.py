"""Checks of integers before a call runs, so that a wrong index never reaches native code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from poptorch.errors import IndexRangeError, explain
from poptorch.ir import SourceLine, StepGraph
from poptorch.ir.ranges import Range


@dataclass(frozen=True)
class IndexCheck:
    """Integers that an op takes from a range: an argument, or what `ops` computes from arguments and state.

    An argument is checked once for all micro-batches. Integers that depend on state alone, on buffers and constants
    that no program changes, are checked when that is bound.
    """

    source: str  # what decides about them, for example "argument x"
    allowed: Range
    line: SourceLine | None
    position: int | None  # of the argument that holds the integers
    ops: StepGraph | None = None  # or what takes all arguments of a micro-batch, then this state:
    state: tuple[str, ...] = ()
    is_of_state: bool = False

    def check(self, indices: torch.Tensor) -> None:
        """Raise `IndexRangeError` if any of these integers, which the check is about, is out of range."""
        wrong = first_wrong(indices, self.allowed)
        if wrong is None:
            return
        place, value = wrong
        at = "" if self.position is None else f" at {place}"
        raise out_of_range(
            f"{self.source} leads to the {self.allowed.what} {value}{at}",
            self.allowed,
            self.line,
            state="nothing of this call has run",
            fix=f"check {'it' if self.is_of_state else 'the data'}, or enlarge what is indexed",
        )


def first_wrong(indices: torch.Tensor, allowed: Range) -> tuple[list[int], int] | None:
    """Where the first integer out of range is, and which it is."""
    if not indices.numel():
        return None
    low, high = torch.aminmax(indices)
    if low.item() >= allowed.low and high.item() <= allowed.high:
        return None
    wrong = (indices < allowed.low) | (indices > allowed.high)
    if allowed.ignored is not None:
        wrong &= indices != allowed.ignored
    if not bool(wrong.any()):
        return None
    place = [int(coordinate) for coordinate in wrong.nonzero()[0]]
    return place, int(indices[tuple(place)])


def out_of_range(what: str, allowed: Range, line: SourceLine | None, **details: Any) -> IndexRangeError:
    """The error about integers that an op does not take."""
    return IndexRangeError(explain(f"{what}, but {allowed.op} takes {allowed}.", where=str(line), **details))
