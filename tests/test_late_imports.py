"""Functions that run when another module is imported."""

from __future__ import annotations

import importlib
import sys

import pytest

from poptorch.late_imports import run_after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that can be imported, and is forgotten afterwards."""
    (tmp_path / "some_module.py").write_text("import sys\nassert 'fail' not in sys.argv\nvalue = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "some_module"
    sys.modules.pop("some_module", None)


def test_it_runs_once_after_the_import(module):
    seen = []
    run_after_import(module, lambda: seen.append(sys.modules[module].value))
    assert seen == []
    imported = importlib.import_module(module)
    importlib.import_module(module)
    assert seen == [1]
    assert type(imported.__loader__).__name__ == "SourceFileLoader"
    assert imported.__spec__.loader is imported.__loader__


def test_it_runs_at_once_if_the_module_is_there(module):
    importlib.import_module(module)
    seen = []
    run_after_import(module, lambda: seen.append(1))
    assert seen == [1]


def test_a_function_may_wait_for_the_module_that_is_just_done(module):
    seen = []
    run_after_import(module, lambda: run_after_import(module, lambda: seen.append(1)))
    importlib.import_module(module)
    assert seen == [1]


def test_a_module_that_fails_runs_nothing_until_it_is_imported_well(module, monkeypatch):
    seen = []
    run_after_import(module, lambda: seen.append(1))
    monkeypatch.setattr(sys, "argv", ["fail"])
    with pytest.raises(AssertionError):
        importlib.import_module(module)
    assert seen == []
    monkeypatch.setattr(sys, "argv", [])
    importlib.import_module(module)
    assert seen == [1]


def test_a_module_that_does_not_exist_is_not_found():
    run_after_import("no_such_module", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")
