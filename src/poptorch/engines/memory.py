"""Let the C library keep the memory that a step frees for the next step.

A step allocates and frees the same buffers over and over. By default glibc gives large ones back to the system and
gets fresh, empty pages for the next step, which costs a transformer some per cent of its time.
"""

from __future__ import annotations

import ctypes
import functools
import sys

from poptorch import environment
from poptorch._logging import logger

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


@functools.cache
def keep_freed_memory() -> None:
    """Stop the C library from returning freed memory to the system; does nothing where it is not glibc."""
    libc = _glibc()
    if libc is None or environment.KEEP_MEMORY.read() == "0":
        return
    if not (libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, -1)):
        logger.debug("the C library keeps its own policy for freed memory")


def return_freed_memory() -> None:
    """Give back to the system what is free now, for when a model is done."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return (
        library if all(hasattr(library, name) for name in ("mallopt", "malloc_trim", "gnu_get_libc_version")) else None
    )
