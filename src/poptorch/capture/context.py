"""Which capture is going on, if any: what annotations inside `forward` talk to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poptorch.capture.losses import LossMarks

_MARKS: ContextVar[LossMarks | None] = ContextVar("poptorch_capture", default=None)


def is_capturing() -> bool:
    """Whether a model is being captured right now in this thread."""
    return _MARKS.get() is not None


def current_marks() -> LossMarks | None:
    """The losses marked so far by the capture that is going on."""
    return _MARKS.get()


@contextmanager
def capturing(marks: LossMarks) -> Iterator[None]:
    """Everything inside belongs to one capture."""
    token = _MARKS.set(marks)
    try:
        yield
    finally:
        _MARKS.reset(token)
