"""Find the user's own line in the Python stack: the innermost frame that is neither torch's nor ours."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

from poptorch.ir import SourceLine

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_TRACER = str(Path(__file__).with_name("trace.py"))
_TRACING = (
    str(Path(__file__).parent),
    *(
        f"{_TORCH}/{part}"
        for part in ("_subclasses", "_functorch", "_higher_order_ops", "fx", "utils/_python_dispatch")
    ),
)
_GENERATED = ("<frozen ", "<string>")


@functools.cache
def is_user_code(filename: str) -> bool:
    return not filename.startswith((_TORCH, _OURS, *_GENERATED)) and "/contextlib.py" not in filename


KnownLines = dict[tuple[CodeType, int], SourceLine]


def current_user_line(known: KnownLines | None = None) -> SourceLine | None:
    """The line of the model that led here, or None if the tracer itself did; `known` are those that were read."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _TRACER:
        if is_user_code(frame.f_code.co_filename):
            place = frame.f_code, frame.f_lineno
            if known is None or place not in known:
                line = _line(frame, frame.f_lineno)
                return line if known is None else known.setdefault(place, line)
            return known[place]
        frame = frame.f_back
    return None


def raising_user_line(traceback: TracebackType | None) -> SourceLine | None:
    """The innermost user's line of an exception's traceback."""
    found: SourceLine | None = None
    while traceback is not None:
        if is_user_code(traceback.tb_frame.f_code.co_filename):
            found = _line(traceback.tb_frame, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def raised_by_user(traceback: TracebackType | None) -> bool:
    """Whether the user's own code raised an exception, and not torch on its behalf."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and is_user_code(traceback.tb_frame.f_code.co_filename)


def raised_by_tracer(traceback: TracebackType | None) -> bool:
    """Whether what traces ops raised an exception: PyTorch's modes and kinds of tensors for that, or ours."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_TRACING)


def _line(frame: FrameType, number: int) -> SourceLine:
    function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # qualified names came with Python 3.11
    return SourceLine.read(frame.f_code.co_filename, number, function)
