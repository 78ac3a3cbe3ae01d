"""Device failures on request, so that users can test the code that recovers from them.

    POPTORCH_FAULT=recoverable@3 python train.py          # the third call of a model in this process fails
    poptorch.testing.injectFault("recoverable:IPU_RESET")  # the next one does

A failed call has changed nothing: it fails before the program runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from poptorch import environment
from poptorch.errors import Error, RecoverableError, UnrecoverableError, VariableError, context, nearest

_KINDS = ("recoverable", *(f"recoverable:{action}" for action in RecoverableError.ACTIONS), "unrecoverable")


@dataclass(frozen=True)
class Fault:
    """A failure of the given kind, due in the call that is so many calls away (1: the next)."""

    kind: str
    due_in: int = 1

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"{self.kind!r} is no kind of fault{nearest(self.kind, _KINDS)}")
        if self.due_in < 1:
            raise ValueError(f"a fault is due in call 1 or later, not {self.due_in}")

    def error(self) -> Error:
        name, _, action = self.kind.partition(":")
        text = f"a device failed because the test asked for it ({self.kind})"
        if name == "unrecoverable":
            return UnrecoverableError.from_backend(text, type="poplar_unrecoverable_runtime_error")
        action = action or "FULL_RESET"
        return RecoverableError.from_backend(text, type="poplar_recoverable_runtime_error", recovery_action=action)


class Faults:
    """The fault that is waiting for its call, if any."""

    def __init__(self) -> None:
        self.waiting: Fault | None = None

    def strike(self) -> None:
        """Count a call; raise if the fault is due in it. Only called while one is waiting."""
        fault = self.waiting
        assert fault is not None
        if fault.due_in > 1:
            self.waiting = replace(fault, due_in=fault.due_in - 1)
            return
        self.waiting = None
        with context("running a model"):
            raise fault.error()


FAULTS = Faults()


def configure() -> None:
    """Take the fault that the environment asks for."""
    value = environment.FAULT.read()
    if not value:
        return
    kind, _, call = value.partition("@")
    try:
        FAULTS.waiting = Fault(kind, int(call or 1))
    except ValueError as error:
        raise VariableError(f"environment variable {environment.FAULT.name} is {value!r}: {error}") from error
