"""What programs know as the compiled core of PopTorch: its errors, and a way to provoke each of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from poptorch.errors import Error, RecoverableError, UnrecoverableError, context
from poptorch.options import validate

__all__ = ["Error", "RecoverableError", "TestErrorType", "UnrecoverableError"]


class TestErrorType(Enum):
    """The kinds of error that `_throwTestError` raises."""

    __test__ = False  # for pytest, which takes the name for a test

    Poptorch = "poptorch_cpp_error"
    Popart = "popart_exception"
    PopartInternal = "popart_internal_exception"
    Poplibs = "poplibs_exception"
    PoplarUnrecoverable = "poplar_unrecoverable_runtime_error"
    PoplarUnknown = "poplar_unknown_runtime_error"
    PoplarRecoverableFullReset = "poplar_recoverable_runtime_error"
    PoplarLinkError = "poplar_link_error"


_CLASSES: Mapping[TestErrorType, type[Error]] = {
    TestErrorType.PoplarRecoverableFullReset: RecoverableError,
    TestErrorType.PoplarUnrecoverable: UnrecoverableError,
}


def _throwTestError(error: TestErrorType) -> None:
    """Raise an error of this kind from two contexts deep, as the device would."""
    text = "This is a test error"
    if error is TestErrorType.PoplarLinkError:
        text += "\nOutput of the linker: -lfoo not found"
    with context("throwTestError::topLevel"), context("throwTestError::bottomLevel"):
        raise _CLASSES.get(error, Error).from_backend(text, type=error.value)


def _validateOptions(values: Mapping[str, Any]) -> None:
    """Check the result of `Options.toDict()` as compiling does."""
    validate(values)
