"""Which capture is going on, if any: what annotations inside `forward` talk to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from poptorch.capture.losses import LossMarks

T = TypeVar("T")
_ON_DEVICE: ContextVar[bool] = ContextVar("poptorch_on_device", default=False)
_AUTOCAST: ContextVar[bool] = ContextVar("poptorch_autocast", default=False)
_MARKS: ContextVar[LossMarks | None] = ContextVar("poptorch_capture", default=None)
_TRAINING: ContextVar[bool] = ContextVar("poptorch_training", default=False)
_OWN_STATE: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("poptorch_state", default=nullcontext)


def is_capturing() -> bool:
    """Whether a model is being captured right now in this thread, or about to be."""
    return _ON_DEVICE.get()


def current_marks() -> LossMarks | None:
    """The losses marked so far by the capture that is going on."""
    return _MARKS.get()


def is_capturing_training() -> bool:
    """Whether a training model is being captured."""
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
    with _set(_ON_DEVICE, True):
        yield


@contextmanager
def capturing(
    marks: LossMarks,
    *,
    training: bool = False,
    own_state: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[None]:
    """Everything inside belongs to one capture; in a context of `own_state`, the module has its own tensors."""
    with _set(_MARKS, marks), _set(_TRAINING, training), _set(_OWN_STATE, own_state), on_device():
        yield


@contextmanager
def off_device() -> Iterator[None]:
    """Everything inside runs on the host, with real tensors, as if no capture were going on."""
    from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

    with (
        _OWN_STATE.get()(),
        _set(_ON_DEVICE, False),
        _set(_MARKS, None),
        _set(_TRAINING, False),
        _set(_AUTOCAST, False),
        _set(_OWN_STATE, nullcontext),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),  # pyright: ignore[reportPrivateUsage]
        torch.no_grad(),
    ):
        yield


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
