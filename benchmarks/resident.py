"""The memory that this process has in use, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak_kib(call: Callable[[], Any]) -> int:
    """How far a call raises the memory in use above what was there before."""
    base = trimmed_rss()
    reset_peak()
    call()
    return status("VmHWM") - base


def trimmed_rss() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return status("VmRSS")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status(field: str) -> int:
    """A field of /proc/self/status in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)
