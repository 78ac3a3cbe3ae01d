"""The tree of exceptions: what a user catches, and how messages look."""

from __future__ import annotations

import pickle

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


def test_an_error_can_be_made_without_raising_it():
    error = poptorch.createPoptorchError("x")
    assert (error.message, error.type, error.location) == ("x", "poptorch_py_error", "")
    assert "x" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        poptorch.Error("it broke"),
        errors.OptionError("no such option"),
        poptorch.RecoverableError("reset", recovery_action="IPU_RESET", location="here"),
    ],
)
def test_errors_survive_the_way_between_processes(error):
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert twin.args == error.args
    assert vars(twin) == vars(error)


def test_errors_of_the_back_end_say_where_they_were_raised():
    with errors.context("outer"), errors.context("inner"):
        error = poptorch.Error.from_backend("it broke")
    assert error.location == "  [0] inner\n  [1] outer\n"
    assert str(error).startswith("test_errors.py:")
    assert "'poptorch_cpp_error': it broke\nError raised in:\n  [0] inner" in str(error)
    assert poptorch.Error.from_backend("again").location == ""


def test_a_very_long_message_stays_whole_where_no_file_can_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poptorch_error.log").mkdir()
    message = "line\n" * 100
    assert poptorch.Error.from_backend(message).message == message


@pytest.mark.parametrize(("breaks", "is_written"), [(80, False), (81, True)])
def test_a_very_long_message_goes_to_a_file(breaks, is_written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "line\n" * breaks
    error = poptorch.Error.from_backend(message)
    assert (tmp_path / "poptorch_error.log").exists() is is_written
    if is_written:
        assert (tmp_path / "poptorch_error.log").read_text() == message
        assert "poptorch_error.log" in error.message
        assert "line\nline" not in str(error)
    else:
        assert error.message == message


@pytest.mark.parametrize(
    ("name", "known", "end"),
    [
        ("colour", ["colours", "size"], "; did you mean 'colours'?"),
        ("x", ["colours", "size"], "; there are colours, size"),
        ("x", [], ""),
        ("x", [f"long{i}" for i in range(20)], ""),
    ],
)
def test_unknown_names_come_with_a_suggestion(name, known, end):
    assert errors.nearest(name, known) == end
