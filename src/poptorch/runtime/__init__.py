"""Engines that run an `Executable`, and the session that drives them."""

from poptorch.runtime.checked import CheckedEngine
from poptorch.runtime.counters import CallTimes, Latency, latency
from poptorch.runtime.eager import EagerEngine
from poptorch.runtime.engine import Engine, Kernel, choose_engine
from poptorch.runtime.layout import with_stride
from poptorch.runtime.memory import return_freed_memory
from poptorch.runtime.session import Session

__all__ = [
    "CallTimes",
    "CheckedEngine",
    "EagerEngine",
    "Engine",
    "Kernel",
    "Latency",
    "Session",
    "choose_engine",
    "latency",
    "return_freed_memory",
    "with_stride",
]
