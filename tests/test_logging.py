"""The logger: its levels and the form of its lines."""

from __future__ import annotations

import importlib
import io
import logging
import sys
import threading

import pytest
import torch

import poptorch
from poptorch import _logging


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
        (1, logging.DEBUG),
        (2, logging.INFO),
        (3, logging.WARNING),
        ("3", logging.WARNING),
        (4, logging.ERROR),
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
def test_environment_sets_the_level(level, seen, monkeypatch, capsys):
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", level)
    importlib.reload(poptorch)
    poptorch.logger.warning("hello")
    assert ("hello" in capsys.readouterr().err) is seen


def test_unknown_levels_are_answered_with_the_known_ones():
    text = "Unknown log level: wibble. Valid values are DEBUG, ERR, INFO, OFF, TRACE and WARN"
    with pytest.raises(ValueError, match=text):
        poptorch.setLogLevel("wibble")
    with pytest.raises(ValueError, match="Invalid log level integer"):
        poptorch.setLogLevel(5)


def test_a_level_that_does_not_exist_stops_the_import(monkeypatch):
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", "NOPE")
    with pytest.raises(ValueError, match="Unknown log level: NOPE"):
        importlib.reload(poptorch)


@pytest.mark.parametrize("level", [0, "FOO", None])
def test_the_graph_compiler_takes_level_names_only(level):
    with pytest.raises(ValueError, match="Level must be one of"):
        _logging.setPopartLogLevel(level)


@pytest.mark.parametrize("level", ["TRACE", "DEBUG", "INFO", "WARN", "ERR", "OFF"])
def test_the_graph_compiler_takes_every_level_name(level):
    _logging.setPopartLogLevel(level)
    assert logging.getLogger("popart").level == _logging._LEVELS[level]


@pytest.fixture
def fresh_repeats():
    _logging.limit_repeats(4)
    yield
    _logging.limit_repeats(4)


def shown(capsys, word):
    return [line for line in capsys.readouterr().err.splitlines() if word in line]


@pytest.mark.usefixtures("fresh_repeats")
def test_the_same_warning_is_shown_four_times_and_then_suppressed(capsys, caplog):
    for _ in range(10):
        poptorch.logger.warning("again and %s", "again")
    lines = shown(capsys, "again and again")
    assert len(lines) == 5
    assert ["suppressed" in line for line in lines] == [False] * 4 + [True]
    assert caplog.text.count("again and again") == 10  # handlers of others still get them all
    assert "suppressed" not in caplog.text


@pytest.mark.usefixtures("fresh_repeats")
def test_different_warnings_and_other_levels_are_not_counted(capsys):
    for number in range(10):
        poptorch.logger.warning("number %d", number)
        poptorch.logger.error("an error")
    assert len(shown(capsys, "number")) == 10


@pytest.mark.usefixtures("fresh_repeats")
@pytest.mark.parametrize(("limit", "count"), [(1, 2), (0, 1), (None, 10)])
def test_options_set_how_often_a_warning_is_repeated(limit, count, capsys):
    options = poptorch.Options().engine("eager").maxRepeatLogs(limit)
    poptorch.inferenceModel(torch.nn.Linear(1, 1), options).compile(torch.ones(1, 1))
    for _ in range(10):
        poptorch.logger.warning("again")
    assert len(shown(capsys, "again")) == count


def handler_for(monkeypatch, destination):
    monkeypatch.setenv("POPTORCH_LOG_DEST", str(destination))
    return _logging._handler(_logging.environment.LOG_DEST.read())


def test_lines_can_go_to_standard_output_or_to_a_file(monkeypatch, tmp_path, capsys):
    record = logging.LogRecord("poptorch::python", logging.WARNING, "", 1, "hello", (), None)
    handler_for(monkeypatch, "stdout").emit(record)
    assert capsys.readouterr().out == "hello\n"
    file = tmp_path / "log.txt"
    file.write_text("old")
    handler = handler_for(monkeypatch, file)
    handler.emit(record)
    handler.close()
    assert file.read_text() == "hello\n"


def line(text):
    return logging.LogRecord("poptorch::python", logging.WARNING, "", 0, text, None, None)


def test_processes_that_a_program_starts_add_to_its_file(monkeypatch, tmp_path):
    path = tmp_path / "log"
    path.write_text("of the last program\n")
    program = handler_for(monkeypatch, path)
    program.emit(line("first"))
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"]
    )
    worker = handler_for(monkeypatch, path)
    worker.emit(line("second"))
    program.emit(line("third"))
    assert path.read_text().splitlines() == ["first", "second", "third"]
    program.close()
    worker.close()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_stream_shows_what_it_can_of_a_line(encoding, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    handler_for(monkeypatch, "stdout").emit(line("3 × 4 → 12"))
    stream.flush()
    assert stream.buffer.getvalue() == "3 × 4 → 12\n".encode(encoding, "backslashreplace")


def test_a_file_that_cannot_be_opened_is_named(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="POPTORCH_LOG_DEST is"):
        handler_for(monkeypatch, tmp_path / "no" / "such" / "folder")


@pytest.mark.parametrize("terminal", [True, False])
def test_levels_are_coloured_on_terminals_only(terminal, monkeypatch):
    monkeypatch.setattr(_logging, "_is_terminal", lambda stream: terminal)
    record = logging.LogRecord("poptorch::python", logging.WARNING, "", 1, "a coloured line", (), None)
    assert ("\033[" in _logging._Formatter().format(record)) is terminal


def test_exceptions_are_logged_with_their_traceback(capsys):
    try:
        raise KeyError("lost")
    except KeyError:
        poptorch.logger.exception("it failed")
    assert "KeyError: 'lost'" in capsys.readouterr().err


@pytest.fixture
def unconfigured(monkeypatch):
    """A logger without handlers and a hook that remembers what it was given, as in a program that has its own."""
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(error))
    handlers, poptorch.logger.handlers = poptorch.logger.handlers, []
    yield seen
    for handler in poptorch.logger.handlers:
        handler.close()
    poptorch.logger.handlers = handlers


def test_a_log_file_shows_what_ended_the_program_and_other_hooks_still_run(unconfigured, monkeypatch, tmp_path):
    file = tmp_path / "log.txt"
    monkeypatch.setenv("POPTORCH_LOG_DEST", str(file))
    _logging.configure()
    ends = [KeyError("lost"), KeyboardInterrupt()]
    for error in ends:
        sys.excepthook(type(error), error, None)
    assert unconfigured == ends
    assert "[critical] the program ends with an exception\nKeyError: 'lost'" in file.read_text()
    assert "KeyboardInterrupt" not in file.read_text()


def test_without_a_log_file_the_hook_of_the_program_is_left_alone(unconfigured, monkeypatch):
    monkeypatch.setenv("POPTORCH_LOG_DEST", "stderr")
    hook = sys.excepthook
    _logging.configure()
    assert sys.excepthook is hook


def test_remarks_of_one_logger_are_kept_from_the_user_in_one_thread(caplog):
    noisy, other = logging.getLogger("noisy"), logging.getLogger("noisy.other")
    with _logging.without_remarks("noisy", logging.WARNING):
        noisy.warning("hidden")
        noisy.error("above the level")
        other.warning("another logger")
        thread = threading.Thread(target=noisy.warning, args=["another thread"])
        thread.start()
        thread.join()
    noisy.warning("afterwards")
    assert caplog.messages == ["above the level", "another logger", "another thread", "afterwards"]


def test_remarks_are_shown_again_after_an_exception(caplog):
    with pytest.raises(KeyError), _logging.without_remarks("noisy"):
        raise KeyError
    logging.getLogger("noisy").warning("shown")
    assert caplog.messages == ["shown"]
    assert not logging.getLogger("noisy").filters
