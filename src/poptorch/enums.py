"""The public enumerations; their integer values are part of the API."""

from __future__ import annotations

from enum import IntEnum


class OutputMode(IntEnum):
    """Which micro-batches of a call hand their outputs back."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class ReductionType(IntEnum):
    """How the gradients of the micro-batches of one update are combined."""

    Sum = 0
    Mean = 1
    NoReduction = 2
