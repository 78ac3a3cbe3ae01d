"""Every exception a user can catch, as one tree.

All of them derive from `poptorch.Error`; where a Python programmer would expect a builtin
(`AssertionError` for a batch that cannot be split, `ValueError` for a bad option) the class derives from it too.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from typing_extensions import Self

LOG_FILE = "poptorch_error.log"  # receives messages that are too long for a terminal
_LONGEST = 80  # line breaks

_CONTEXT: ContextVar[tuple[str, ...]] = ContextVar("poptorch_error_context", default=())  # innermost first


class Error(Exception):
    """Something went wrong in PopTorch: `message` is the text, `type` the layer, `location` what it was doing."""

    def __init__(
        self, message: str, *, type: str = "poptorch_py_error", location: str = "", raised_at: str = ""
    ) -> None:
        self.message = message
        self.type = type
        self.location = location
        lines = [f"{raised_at}'{type}': {message}", *self._details()]
        super().__init__("\n".join([*lines, "Error raised in:", location] if location else lines))

    def _details(self) -> list[str]:
        """Lines that stand between the message and the location."""
        return []

    @classmethod
    def from_backend(cls, message: str, *, type: str = "poptorch_cpp_error", **more: Any) -> Self:
        """An error of the compiler or the device, located by the open contexts; a long message goes to a file."""
        caller = sys._getframe(1)
        if message.count("\n") > _LONGEST:
            with suppress(OSError):  # without a place for it, the message stays as long as it is
                Path(LOG_FILE).write_text(message, encoding="utf-8")
                message = f"the message is long: it was written to {LOG_FILE} in the working folder"
        location = "".join(f"  [{level}] {name}\n" for level, name in enumerate(_CONTEXT.get()))
        at = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}: "
        return cls(message, type=type, location=location, raised_at=at, **more)

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.args, vars(self))


def _rebuild(kind: type[Error], args: tuple[str, ...], attributes: dict[str, Any]) -> Error:
    """Unpickle: `args` hold the whole text, so the constructor must not build it again."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


@contextmanager
def context(name: str) -> Iterator[None]:
    """Say what is going on, for the `location` of errors that the back end raises inside."""
    token = _CONTEXT.set((name, *_CONTEXT.get()))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def createPoptorchError(msg: str) -> Error:
    """Make an error to raise: `raise poptorch.createPoptorchError("my message")`."""
    return Error(msg)


class RecoverableError(Error):
    """A device failed in a way that a reset repairs; `recovery_action` names the reset."""

    ACTIONS = ("IPU_RESET", "LINK_RESET", "PARTITION_RESET", "FULL_RESET")

    def __init__(self, message: str, *, recovery_action: str = "FULL_RESET", **more: Any) -> None:
        self.recovery_action = recovery_action
        super().__init__(message, **more)

    def _details(self) -> list[str]:
        return [f"Recovery action: {self.recovery_action}"]


class UnrecoverableError(Error):
    """A device failed for good."""


class CompileError(Error):
    """The model cannot be turned into a program; the message names the user's line and a way out."""


class CaptureError(CompileError, RuntimeError):
    """PyTorch raised an error while `forward` was compiled."""


class AnnotationError(CompileError, AssertionError):
    """A block of the model does not fit the execution strategy."""


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


class DeviceError(Error, AssertionError):
    """There is no IPU to ask."""


class BatchSizeError(Error, AssertionError):
    """The rows of a tensor argument do not divide into the micro-batches that the options ask for."""


class ArgumentError(Error):
    """A call does not match the one that the model was compiled for."""


class ArgumentValueError(Error, ValueError):
    """An argument of a function to call inside `forward` has a value that it cannot have."""


class ArgumentBindingError(Error, AssertionError):
    """The arguments of a call do not fit the signature of the model's forward."""


class AnchorError(Error, AssertionError):
    """There is no such anchor, or nothing was collected for it yet."""


class GuardError(Error):
    """A batch contradicts a value that was frozen into the program when it was compiled."""


class FloatError(Error, FloatingPointError):
    """A model computed NaN or infinity, and `Precision.enableFloatingPointExceptions` asked to be told."""


class IndexRangeError(Error, IndexError):
    """An integer of a batch indexes something that does not exist."""


class AttributeValueError(Error, ValueError):
    """An attribute of a custom op has a name or a value that it cannot have."""


class OptimizerError(Error, AssertionError):
    """An optimiser, or one of its settings, cannot be compiled."""


class OptimizerStateError(Error, RuntimeError):
    """The state of an optimiser does not belong to the model that it trains."""


class OptimizerValueError(Error, ValueError):
    """A setting of an optimiser has a value that cannot be compiled, or not any more."""


class WrappedError(Error, RuntimeError):
    """The model is already wrapped for training."""


class FormatKeyError(Error, KeyError):
    """There is no format of this name."""

    __str__ = Exception.__str__  # a KeyError would quote the whole message


class HookError(Error, RuntimeError):
    """Something that cannot be called was registered to be called."""


class EngineError(Error):
    """The compiled program could not be built or failed while it ran."""


class ProcessError(Error, RuntimeError):
    """Another process of the program failed, stopped answering, or runs another program; `rank` says which."""

    def __init__(self, message: str, *, rank: int | None = None, **more: Any) -> None:
        self.rank = rank
        super().__init__(message, **more)


class FileError(Error):
    """A file of a compiled model cannot be read, or not be written."""


class FileContentError(FileError, AssertionError):
    """A file of a compiled model is of another version, or lacks what was asked for."""


class DataError(Error, AssertionError):
    """The arguments of a loader do not fit together, or it cannot be used in this state."""


class WorkerError(Error, AssertionError, RuntimeError):
    """A process that loads data raised an exception, died, or stopped making progress."""


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
