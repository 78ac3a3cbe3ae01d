"""Let Python look for garbage later, or less often.

It looks whenever many new objects are there, and a graph is little else: a fifth of the time until the first step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """Inside, no thread stops to search for objects that refer to each other and to nothing else."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_RARELY = 50_000, 20, 100  # new objects between two looks at the young, and how many of those between looks at the old


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Inside, Python looks for garbage less often: where so much is made that it cannot all be kept to the end."""
    before = gc.get_threshold()
    if before[0]:  # it is 0 where a program has switched this off
        gc.set_threshold(*map(max, before, _RARELY))
    try:
        yield
    finally:
        gc.set_threshold(*before)
