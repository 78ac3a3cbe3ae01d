"""The module in which programs look for `PoplarExecutor`."""

from poptorch.model import PoplarExecutor

__all__ = ["PoplarExecutor"]
