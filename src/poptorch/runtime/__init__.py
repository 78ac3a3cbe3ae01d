"""Engines that run an `Executable`, and the session that drives them."""

from poptorch.runtime.engine import Engine, Kernel, choose_engine
from poptorch.runtime.session import Session

__all__ = ["Engine", "Kernel", "Session", "choose_engine"]
