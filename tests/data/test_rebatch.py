from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, lists

from poptorch.data.rebatch import pieces
from poptorch.errors import DataError


@given(rows=lists(integers(0, 9), max_size=12), size=integers(1, 7))
def test_batches_are_the_rows_in_order(rows, size):
    everything = torch.arange(sum(rows))
    batch, batches = torch.full((size,), -1), []
    for piece in pieces(([item] for item in everything.split(rows)), size):
        batch[piece.row : piece.row + piece.rows] = piece.tensors[0]
        if piece.completes:
            batches += batch.tolist()
    assert batches == list(range(sum(rows) // size * size))


def test_rows_of_all_tensors_must_agree():
    with pytest.raises(DataError, match="different numbers of rows"):
        list(pieces([[torch.zeros(2), torch.zeros(3)]], 4))
    with pytest.raises(DataError, match="without a batch dimension"):
        list(pieces([[torch.zeros(())]], 4))
