"""One value from the copies that a call returns."""

from __future__ import annotations

import pytest
import torch

import poptorch
from poptorch.lightning.results import Batching, Output, combined, narrowed, reduced, reduction_name

Mode = poptorch.OutputMode


def batching(mode=Mode.All, iterations=2, accumulation=1, replicas=2):
    return Batching(iterations, accumulation, replicas, mode)


def test_batching_reads_options():
    options = poptorch.Options().deviceIterations(3).replicationFactor(2)
    options.Training.gradientAccumulation(4)
    assert Batching.of(options, training=True) == Batching(3, 4, 2, Mode.Final)
    assert Batching.of(options, training=False) == Batching(3, 1, 2, Mode.All)
    assert Batching.of(options, training=True).micro_batches == 24


@pytest.mark.parametrize(("reduction", "value"), [("mean", 2.5), ("sum", 10.0), ("min", 1.0), ("max", 4.0)])
def test_reductions(reduction, value):
    copies = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert reduced(copies, reduction, batching()) == value
    assert reduced(copies.half(), reduction, batching()).dtype == torch.float32
    assert reduced(copies.int(), reduction, batching()) == value


def test_one_copy_stands_for_all():
    assert reduced(torch.tensor(3.0), "sum", batching()) == 12
    assert reduced(torch.tensor(3.0), "mean", batching()) == 3


def test_sums_are_divided_by_what_they_add_up():
    copies = torch.tensor([6.0, 10.0])  # one per replica, of three device iterations
    assert reduced(copies, "mean", batching(Mode.Sum, iterations=2)) == 4
    assert reduced(copies, "sum", batching(Mode.Sum)) == 16


def test_rows_and_integers_are_not_averaged():
    rows = torch.arange(8.0).reshape(4, 2)
    assert combined(rows, Output.of(torch.zeros(1, 2)), batching()) is rows
    counts = torch.tensor([1, 2, 3, 4])
    assert combined(counts, Output.of(torch.tensor(1)), batching()) is counts
    assert combined(torch.tensor([1.0, 3.0]), Output.of(torch.tensor(1.0)), batching()) == 2


def test_64_bit_types_come_back():
    for dtype in (torch.int64, torch.float64):
        tensor = torch.ones(2, dtype=dtype)
        assert narrowed(tensor).dtype == {torch.int64: torch.int32, torch.float64: torch.float32}[dtype]
        assert Output.of(tensor).widened(narrowed(tensor)).dtype == dtype
    half = torch.ones(2).half()
    assert Output.of(half).widened(narrowed(half)) is half


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("mean", "mean"),
        ("AVG", "mean"),
        (torch.mean, "mean"),
        (sum, "sum"),
        (min, "min"),
        (torch.max, "max"),
        ("median", None),
        (torch.median, None),
    ],
)
def test_names_of_reductions(given, name):
    assert reduction_name(given) == name
