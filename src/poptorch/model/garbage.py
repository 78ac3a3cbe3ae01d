"""Let Python look for garbage later.

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
