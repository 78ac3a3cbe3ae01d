"""The tree of exceptions: what a user catches, and how messages look."""

from __future__ import annotations

import pytest

import poptorch
from poptorch import errors

OURS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_exception_is_a_poptorch_error_with_a_docstring(kind):
    assert issubclass(kind, poptorch.Error)
    assert kind.__doc__


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.BatchSizeError, AssertionError),
        (errors.ArgumentBindingError, AssertionError),
        (errors.OptimizerError, AssertionError),
        (errors.WrappedError, RuntimeError),
    ],
)
def test_exceptions_derive_from_the_builtin_a_reader_expects(kind, builtin):
    assert issubclass(kind, builtin)


def test_errors_carry_message_type_and_location():
    error = poptorch.Error("it broke", type="poptorch_cpp_error", location="here")
    assert (error.message, error.type, error.location) == ("it broke", "poptorch_cpp_error", "here")
    assert str(error) == "'poptorch_cpp_error': it broke\nError raised in:\nhere"


def test_explanations_align_their_details():
    assert errors.explain("it broke.", where="train.py:3", fix="mend it") == (
        "it broke.\n  where: train.py:3\n  fix:   mend it"
    )
