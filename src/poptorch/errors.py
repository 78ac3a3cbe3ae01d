"""Every exception a user can catch, as one tree.

All of them derive from `poptorch.Error`; where a Python programmer would expect a builtin
(`AssertionError` for a batch that cannot be split, `ValueError` for a bad option) the class derives from it too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Error(Exception):
    """Something went wrong in PopTorch: `message` is the text, `type` the layer, `location` the context."""

    def __init__(self, message: str, *, type: str = "poptorch_py_error", location: str = "") -> None:
        self.message = message
        self.type = type
        self.location = location
        super().__init__(f"'{type}': {message}")


class RecoverableError(Error):
    """A device failed in a way that a reset repairs; `recovery_action` names the reset."""

    recovery_action: str = "FULL_RESET"


class UnrecoverableError(Error):
    """A device failed for good."""


class CompileError(Error):
    """The model cannot be turned into a program; the message names the user's line and a way out."""


class CaptureError(CompileError, RuntimeError):
    """PyTorch raised an error while `forward` was compiled."""


class LossError(CompileError):
    """There is not exactly one final loss to differentiate."""


class OptionError(Error, AssertionError):
    """An option does not exist, or was given a value of the wrong type or out of range."""


class OptionValueError(Error, ValueError):
    """An option was given a value of the right type that it cannot take."""


class ConfigFileError(Error):
    """A file of options is not written as `Options.loadFromFile` reads it."""


class VariableError(Error, ValueError):
    """An environment variable has a value that it cannot have."""


class BatchSizeError(Error, AssertionError):
    """The rows of a tensor argument do not divide into the micro-batches that the options ask for."""


class ArgumentError(Error):
    """A call does not match the one that the model was compiled for."""


class ArgumentBindingError(Error, AssertionError):
    """The arguments of a call do not fit the signature of the model's forward."""


class GuardError(Error):
    """A batch contradicts a value that was frozen into the program when it was compiled."""


class IndexRangeError(Error, IndexError):
    """An integer of a batch indexes something that does not exist."""


class OptimizerError(Error, AssertionError):
    """An optimiser, or one of its settings, cannot be compiled."""


class WrappedError(Error, RuntimeError):
    """The model is already wrapped for training."""


class EngineError(Error):
    """The compiled program could not be built or failed while it ran."""


def explain(what: str, **details: str) -> str:
    """A message in the house form: what happened, then one aligned `name: value` line per detail."""
    width = max((len(name) for name in details), default=0) + 1
    return "\n".join([what, *(f"  {name + ':':<{width}} {value}" for name, value in details.items())])


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that looks most like it, or all if they are few."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(names)}" if 0 < len(names) <= 8 else ""
