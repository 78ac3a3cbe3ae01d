"""The one logger of the library: its levels, its line format, and where lines go."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TextIO

from poptorch import environment

logger = logging.getLogger("poptorch::python")

_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "OFF": logging.CRITICAL,
}
_NAMES = "DEBUG, ERR, INFO, OFF, TRACE and WARN"
_NUMBERS = {0: "TRACE", 1: "DEBUG", 2: "INFO", 3: "WARN", 4: "ERR", 6: "OFF"}
_COLOURS = {
    logging.INFO: "\033[32m",
    logging.WARNING: "\033[33m",
    logging.ERROR: "\033[31m",
    logging.CRITICAL: "\033[41m",
}
_NO_COLOUR = "\033[0m"


class _StreamHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` or `sys.stdout` is now, so that redirecting it works after the import."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._stream_name = name

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(sys, self._stream_name)

    def format(self, record: logging.LogRecord) -> str:
        """The line with what the stream can show of it; a terminal may know fewer characters than we use."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        return super().format(record).encode(encoding, "backslashreplace").decode(encoding)


class _RepeatLimit(logging.Filter):
    """Shows the same warning a few times only. It sits on our handler, so other handlers still see every line."""

    _REMEMBERED = 1000

    def __init__(self) -> None:
        super().__init__()
        self.restart(4)

    def restart(self, limit: int) -> None:
        """Count from zero again, up to this limit."""
        self._limit = limit
        self._seen: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        if len(self._seen) > self._REMEMBERED:
            self._seen.clear()
        self._seen[record.getMessage()] += 1
        return self._seen[record.getMessage()] <= self._limit + 1

    def is_exceeded(self, record: logging.LogRecord) -> bool:
        """Whether this is the line after the last one that is shown."""
        return self._seen[record.getMessage()] == self._limit + 1


class _OneProcess(logging.Filter):
    """Shows what process 0 of a program logs, and the errors of all: most lines are the same everywhere."""

    index = 0

    def filter(self, record: logging.LogRecord) -> bool:
        return self.index == 0 or record.levelno >= logging.ERROR or environment.LOG_ALL_PROCESSES.flag()


_repeats = _RepeatLimit()
_process = _OneProcess()


class _Formatter(logging.Formatter):
    """`[12:34:56.789] [poptorch::python] [warning] text`, with a coloured level on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        time = self.formatTime(record, "%H:%M:%S")
        level, text = record.levelname.lower(), record.getMessage()
        if record.levelno in _COLOURS and _is_terminal(sys.stdout) and _is_terminal(sys.stderr):
            level = f"{_COLOURS[record.levelno]}{level}{_NO_COLOUR}"
        if _repeats.is_exceeded(record):
            text = f"suppressed from now on: {text}"
        name = f"[{record.name}]" if _process.index == 0 else f"[{record.name}] [process {_process.index}]"
        line = f"[{time}.{int(record.msecs):03d}] {name} [{level}] {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def setLogLevel(level: str | int) -> None:
    """Show log lines of this level and above: TRACE, DEBUG, INFO, WARN (the default), ERR or OFF.

    >>> setLogLevel("ERR")
    >>> setLogLevel(3)  # WARN
    """
    if isinstance(level, str) and level.isdigit():
        level = int(level)
    if isinstance(level, int):
        if level not in _NUMBERS:
            raise ValueError(f"Invalid log level integer {level}: use one of {sorted(_NUMBERS)}")
        level = _NUMBERS[level]
    if level not in _LEVELS:
        raise ValueError(f"Unknown log level: {level}. Valid values are {_NAMES}")
    logger.setLevel(_LEVELS[level])


def setPopartLogLevel(level: str) -> None:
    """Set the level of the logger `popart`, for programs that do; nothing here writes to it."""
    if not isinstance(level, str) or level not in _LEVELS:
        raise ValueError(f"Level must be one of {_NAMES}, not {level!r}")
    logging.getLogger("popart").setLevel(_LEVELS[level])


def log_as_process(index: int) -> None:
    """Log as this process of a program: all but the first show errors only, unless the environment asks for more."""
    _process.index = index


def limit_repeats(limit: int) -> None:
    """Show the same warning this many times from now on (`Options.maxRepeatLogs`)."""
    _repeats.restart(limit)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, the first time in this process that it is given."""
    logger.warning("%s", text)


@contextmanager
def without_remarks(name: str, level: int = logging.ERROR) -> Iterator[None]:
    """Keep what another library logs for its own developers, up to this level, from the user.

    Only the logger of this name is silenced, and only for the thread that runs what is inside.
    """
    thread = threading.get_ident()

    def is_shown(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno > level

    other = logging.getLogger(name)
    other.addFilter(is_shown)
    try:
        yield
    finally:
        other.removeFilter(is_shown)


def configure() -> None:
    """Give the logger its handler and the level that the environment asks for."""
    if not logger.handlers:
        handler = _handler(environment.LOG_DEST.read())
        handler.setFormatter(_Formatter())
        handler.addFilter(_process)
        handler.addFilter(_repeats)
        logger.addHandler(handler)
        if isinstance(handler, logging.FileHandler):
            _log_what_ends_the_program()
    setLogLevel(environment.LOG_LEVEL.read())


def _log_what_ends_the_program() -> None:
    """Let a log file show the exception that nobody caught; whatever hook is installed still does its work.

    On a terminal Python prints it anyway.
    """
    hook = sys.excepthook

    def log_and_go_on(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            logger.critical("the program ends with an exception", exc_info=(kind, error, traceback))
        hook(kind, error, traceback)

    sys.excepthook = log_and_go_on


def _handler(destination: str) -> logging.Handler:
    if destination in ("stderr", "stdout"):
        return _StreamHandler(destination)
    try:
        if not _is_helper_process():
            Path(destination).write_bytes(b"")
        return logging.FileHandler(destination, mode="a", encoding="utf-8")
    except OSError as error:
        raise environment.LOG_DEST.unusable(error) from error


def _is_helper_process() -> bool:
    """Whether Python's multiprocessing started this process, for a program that writes to the same file."""
    return any(argument.startswith("from multiprocessing.") for argument in sys.orig_argv)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
