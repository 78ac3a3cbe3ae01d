"""The module in which programs look for the class that binds the arguments of a call."""

from poptorch.model.arguments import ArgumentBinder as ArgsParser

__all__ = ["ArgsParser"]
