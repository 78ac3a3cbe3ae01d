"""The errors of the core: their classes, types, contexts and recovery actions."""

from __future__ import annotations

import pytest

import poptorch
import poptorch.poptorch_core as core
from poptorch.poptorch_core import TestErrorType as Kind

TYPES = {
    Kind.Poptorch: "poptorch_cpp_error",
    Kind.Popart: "popart_exception",
    Kind.PopartInternal: "popart_internal_exception",
    Kind.Poplibs: "poplibs_exception",
    Kind.PoplarUnrecoverable: "poplar_unrecoverable_runtime_error",
    Kind.PoplarUnknown: "poplar_unknown_runtime_error",
    Kind.PoplarRecoverableFullReset: "poplar_recoverable_runtime_error",
    Kind.PoplarLinkError: "poplar_link_error",
}
CLASSES = {
    Kind.PoplarRecoverableFullReset: poptorch.RecoverableError,
    Kind.PoplarUnrecoverable: poptorch.UnrecoverableError,
}


def test_errors_are_the_same_classes_under_both_names():
    assert core.Error is poptorch.Error
    assert issubclass(poptorch.RecoverableError, poptorch.Error)
    assert issubclass(poptorch.UnrecoverableError, poptorch.Error)
    assert not issubclass(poptorch.Error, RuntimeError)


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_is_raised_with_its_type_and_context(kind):
    with pytest.raises(poptorch.Error) as caught:
        core._throwTestError(kind)
    error = caught.value
    assert type(error) is CLASSES.get(kind, poptorch.Error)
    assert error.type == TYPES[kind]
    for name in ("throwTestError::bottomLevel", "throwTestError::topLevel"):
        assert name in error.args[0]
        assert error.location.count(name) == 1
        assert name not in error.message
    assert error.location.startswith("  [0] throwTestError::bottomLevel\n  [1] ")


def test_a_recoverable_error_says_how_to_recover():
    with pytest.raises(poptorch.RecoverableError) as caught:
        core._throwTestError(Kind.PoplarRecoverableFullReset)
    assert caught.value.recovery_action == "FULL_RESET"
    assert "FULL_RESET" in str(caught.value)


def test_each_error_has_only_its_own_context():
    for kind in (Kind.PoplarRecoverableFullReset, Kind.PoplarLinkError):
        with pytest.raises(poptorch.Error) as caught:
            core._throwTestError(kind)
    assert caught.value.location.count("\n") == 2
    assert "-lfoo not found" in caught.value.message


@pytest.mark.parametrize("kind", Kind)
def test_handlers_in_the_usual_order_reach_the_right_branch(kind):
    class Model:
        def __init__(self):
            core._throwTestError(kind)

    try:
        Model()
    except poptorch.RecoverableError:
        reached = poptorch.RecoverableError
    except poptorch.UnrecoverableError:
        reached = poptorch.UnrecoverableError
    except poptorch.Error:
        reached = poptorch.Error
    assert reached is CLASSES.get(kind, poptorch.Error)
