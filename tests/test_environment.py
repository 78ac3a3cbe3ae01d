"""Environment variables: read when asked, with errors that name the variable and its value."""

from __future__ import annotations

import pytest

import poptorch
from poptorch import environment


@pytest.mark.parametrize("variable", environment.VARIABLES, ids=lambda variable: variable.name)
def test_variables_read_their_value_or_their_default(variable, monkeypatch):
    monkeypatch.delenv(variable.name, raising=False)
    assert variable.read() == variable.default
    monkeypatch.setenv(variable.name, "something")
    assert variable.read() == "something"
    assert variable.meaning


def test_each_variable_is_declared_once():
    names = [variable.name for variable in environment.VARIABLES]
    assert len(names) == len(set(names)) > 10


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), ("-1", True), ("7", True)])
def test_switches_are_integers(value, on, monkeypatch):
    monkeypatch.setenv("POPTORCH_IPU_MODEL", value)
    assert environment.IPU_MODEL.flag() is on


@pytest.mark.parametrize("value", ["yes", "", "1.0"])
def test_text_in_a_switch_is_an_error_that_names_it(value, monkeypatch):
    monkeypatch.setenv("POPTORCH_IPU_MODEL", value)
    with pytest.raises(poptorch.Error, match=f"POPTORCH_IPU_MODEL is '{value}'") as caught:
        environment.IPU_MODEL.flag()
    assert isinstance(caught.value, ValueError)
