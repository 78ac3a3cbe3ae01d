"""Checks of the user's integers before a call runs, so that a wrong index never reaches native code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from poptorch.errors import IndexRangeError, explain
from poptorch.ir import SourceLine


@dataclass(frozen=True)
class IndexCheck:
    """Integers that index something of `size` elements.

    They are the user's input at `position` itself or, if `ops` is given, what `ops` computes from all inputs of one
    micro-batch. Valid are 0 to size - 1, down to -size if `wraps`, and `ignored`.
    """

    name: str
    position: int
    ops: fx.GraphModule | None
    size: int
    wraps: bool
    ignored: int | None
    op: str
    line: SourceLine | None

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise `IndexRangeError` if any index of these tensors is out of range."""
        indices = tensors[self.position] if self.ops is None else self.ops(*tensors)
        low, high = torch.aminmax(indices)
        least = -self.size if self.wraps else 0
        if low.item() >= least and high.item() < self.size:
            return
        wrong = (indices < least) | (indices >= self.size)
        if self.ignored is not None:
            wrong &= indices != self.ignored
        if bool(wrong.any()):
            self._raise(indices, wrong, least)

    def _raise(self, indices: torch.Tensor, wrong: torch.Tensor, least: int) -> None:
        where = [int(coordinate) for coordinate in wrong.nonzero()[0]]
        value = int(indices[tuple(where)])
        place = "" if self.ops is not None else f" at {where}"
        valid = f"{least} to {self.size - 1}"
        raise IndexRangeError(
            explain(
                f"argument {self.name} leads to the index {value}{place}, but {self.op} takes {valid}.",
                where=str(self.line),
                state="nothing of this call has run",
                fix="check the data, or enlarge what is indexed",
            )
        )
