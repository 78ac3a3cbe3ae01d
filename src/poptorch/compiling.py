"""Let libraries know that a model is being compiled.

`torch.compiler.is_compiling()` reads a flag of its module, and `torch.export` sets it as we do: there is no other way
to let it be true. It is the one thing of PyTorch that we ever assign to. By it torch's optimisers know that tensors
have no values, and libraries of models that a branch on the values of one batch, made for speed, would be part of the
program for all batches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CHANGING = threading.Lock()
_inside = 0  # how many blocks of all threads


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` is true; for other threads as well, while this one is inside."""
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(step: int) -> None:
    global _inside
    with _CHANGING:
        _inside += step
        torch.compiler._is_compiling_flag = _inside > 0
