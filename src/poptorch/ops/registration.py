"""Let torch know all ops of ours, for a process that reads programs: those that are captured import what they use."""

from __future__ import annotations

import importlib
import pkgutil

import poptorch.ops


def know_our_ops() -> None:
    """Register every op that a program may call."""
    for module in pkgutil.iter_modules(poptorch.ops.__path__):
        importlib.import_module(f"{poptorch.ops.__name__}.{module.name}")
