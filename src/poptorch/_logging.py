"""The one logger of the library, its levels and its line format."""

from __future__ import annotations

import functools
import logging
import sys
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
_NUMBERS = {0: "TRACE", 1: "DEBUG", 2: "INFO", 3: "WARN", 4: "ERR", 6: "OFF"}


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is now, so that redirecting it works after the import."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = self.formatTime(record, "%H:%M:%S")
        text = record.getMessage()
        return f"[{time}.{int(record.msecs):03d}] [{record.name}] [{record.levelname.lower()}] {text}"


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
        raise ValueError(f"Unknown log level: {level}. Valid values are DEBUG, ERR, INFO, OFF, TRACE and WARN")
    logger.setLevel(_LEVELS[level])


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, the first time in this process that it is given."""
    logger.warning("%s", text)


def configure() -> None:
    """Give the logger its handler and the level that the environment asks for."""
    if not logger.handlers:
        handler = _StderrHandler()
        handler.setFormatter(_Formatter())
        logger.addHandler(handler)
    setLogLevel(environment.LOG_LEVEL.read())
