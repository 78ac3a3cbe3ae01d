"""Put consecutive batches of a batch sampler together, so that one item feeds a whole call of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from poptorch.structure import flatten, flatten_like, rebuild


def grouped(batches: Iterable[Any], size: int, *, drop_last: bool) -> Iterator[Any]:
    """Items of `size` batches each; the last, incomplete one only if it is not to be dropped."""
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        if len(group) == size or not drop_last:
            yield joined(group)


def joined(batches: list[Any]) -> Any:
    """One batch with the rows of all; the structure is that of the first."""
    if len(batches) == 1:
        return batches[0]
    structure, _ = flatten(batches[0])
    columns = zip(*(flatten_like(structure, batch) for batch in batches), strict=True)
    return rebuild(structure, [torch.cat(column) for column in columns])
