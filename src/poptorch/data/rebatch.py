"""Cut a stream of items of any number of rows into batches of one size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from poptorch.errors import DataError


@dataclass(frozen=True)
class Piece:
    """Rows of one item that go into the current batch at `row`; `completes` says that they fill it."""

    tensors: Sequence[Tensor]
    row: int
    completes: bool

    @property
    def rows(self) -> int:
        return len(self.tensors[0])


def pieces(items: Iterable[Sequence[Tensor]], size: int) -> Iterator[Piece]:
    """Where the rows of each item go, in order; an item that does not fit is split over consecutive batches."""
    filled = 0
    for tensors in items:
        rows = _rows(tensors)
        taken = 0
        while taken < rows:
            count = min(rows - taken, size - filled)
            part = tensors if count == rows else [tensor.narrow(0, taken, count) for tensor in tensors]
            yield Piece(part, filled, filled + count == size)
            taken += count
            filled = (filled + count) % size


def _rows(tensors: Sequence[Tensor]) -> int:
    if not all(tensor.dim() for tensor in tensors):
        raise DataError("batches of another size cannot be made from numbers without a batch dimension.")
    counts = {len(tensor) for tensor in tensors}
    if len(counts) != 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise DataError(f"the tensors of an item have different numbers of rows, so they cannot be split: {shapes}.")
    return counts.pop()
