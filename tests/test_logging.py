"""The logger: its levels and the form of its lines."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

import poptorch


@pytest.fixture(autouse=True)
def restore_level():
    level = poptorch.logger.level
    yield
    poptorch.logger.setLevel(level)


@pytest.mark.parametrize(
    ("level", "number"),
    [
        ("TRACE", logging.DEBUG),
        ("DEBUG", logging.DEBUG),
        ("INFO", logging.INFO),
        ("WARN", logging.WARNING),
        ("ERR", logging.ERROR),
        ("OFF", logging.CRITICAL),
        (0, logging.DEBUG),
        (2, logging.INFO),
        ("3", logging.WARNING),
        (6, logging.CRITICAL),
    ],
)
def test_levels_by_name_and_number(level, number):
    poptorch.setLogLevel(level)
    assert poptorch.logger.level == number


@pytest.mark.parametrize("level", ["LOUD", 5, 17, "9"])
def test_unknown_levels_are_refused(level):
    with pytest.raises(ValueError, match=r"[Ll]evel|use one of"):
        poptorch.setLogLevel(level)


def test_lines_go_to_standard_error_with_time_and_level(capsys):
    poptorch.setLogLevel("INFO")
    poptorch.logger.info("hello %s", "world")
    line = capsys.readouterr().err.strip()
    assert line.endswith("[poptorch::python] [info] hello world")
    assert line.startswith("[")


@pytest.mark.parametrize(("level", "seen"), [("INFO", True), ("ERR", False)])
def test_environment_sets_the_level(level, seen, monkeypatch):
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", level)
    program = "import poptorch; poptorch.logger.warning('hello')"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ("hello" in ran.stderr) is seen
