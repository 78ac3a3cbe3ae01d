"""Which capture is going on, if any: what annotations inside `forward` talk to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poptorch.capture.losses import LossMarks

_ON_DEVICE: ContextVar[bool] = ContextVar("poptorch_on_device", default=False)
_AUTOCAST: ContextVar[bool] = ContextVar("poptorch_autocast", default=False)
_TRAINING: ContextVar[bool] = ContextVar("poptorch_training", default=False)
_MARKS: ContextVar[LossMarks | None] = ContextVar("poptorch_capture", default=None)


def is_capturing() -> bool:
    """Whether a model is being captured right now in this thread, or about to be."""
    return _ON_DEVICE.get()


def current_marks() -> LossMarks | None:
    """The losses marked so far by the capture that is going on."""
    return _MARKS.get()


def is_capturing_training() -> bool:
    """Whether a training model is being captured right now in this thread."""
    return _TRAINING.get()


def is_autocasting() -> bool:
    """Whether `forward` is inside a region of `poptorch.autocast()`."""
    return _AUTOCAST.get()


def start_autocast(enabled: bool) -> Token[bool]:
    """Begin a region; the token ends it."""
    return _AUTOCAST.set(enabled)


def leave_autocast(before: Token[bool]) -> None:
    """End a region: what was before holds again."""
    _AUTOCAST.reset(before)


@contextmanager
def on_device() -> Iterator[None]:
    """Everything inside counts as running on the device, although no capture need be going on yet."""
    token = _ON_DEVICE.set(True)
    try:
        yield
    finally:
        _ON_DEVICE.reset(token)


@contextmanager
def capturing(marks: LossMarks, *, is_training: bool = False) -> Iterator[None]:
    """Everything inside belongs to one capture."""
    token, training = _MARKS.set(marks), _TRAINING.set(is_training)
    try:
        with on_device():
            yield
    finally:
        _MARKS.reset(token)
        _TRAINING.reset(training)
