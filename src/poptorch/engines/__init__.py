"""Engines: each makes programs ready to run on this machine, by host passes and kernels of its own."""

from poptorch.engines.checked import CheckedEngine
from poptorch.engines.choose import NativeEngine, TieredEngine, choose_engine
from poptorch.engines.eager import EagerEngine
from poptorch.engines.engine import NOTHING_TO_WRITE, Bound, Engine, Kernel, Started, finish
from poptorch.engines.memory import return_freed_memory
from poptorch.engines.portable import Portable, kernels_from, make_portable, stays_here
from poptorch.engines.surroundings import surroundings

__all__ = [
    "NOTHING_TO_WRITE",
    "Bound",
    "CheckedEngine",
    "EagerEngine",
    "Engine",
    "Kernel",
    "NativeEngine",
    "Portable",
    "Started",
    "TieredEngine",
    "choose_engine",
    "finish",
    "kernels_from",
    "make_portable",
    "return_freed_memory",
    "stays_here",
    "surroundings",
]
