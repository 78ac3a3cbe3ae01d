"""Which capture is going on, if any: what annotations inside `forward` talk to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import torch

from poptorch.ir import Hint
from poptorch.ops.printing import silent

if TYPE_CHECKING:
    from poptorch.capture.intercept import Intercept
    from poptorch.capture.losses import LossMarks
    from poptorch.capture.placer import Placer

T = TypeVar("T")
_ON_DEVICE: ContextVar[bool] = ContextVar("poptorch_on_device", default=False)
_AUTOCAST: ContextVar[bool] = ContextVar("poptorch_autocast", default=False)
_TRAINING: ContextVar[bool] = ContextVar("poptorch_training", default=False)
_MARKS: ContextVar[LossMarks | None] = ContextVar("poptorch_capture", default=None)
_INTERCEPT: ContextVar[Intercept | None] = ContextVar("poptorch_intercept", default=None)
_PLACER: ContextVar[Placer | None] = ContextVar("poptorch_placer", default=None)
_NUMBERS: ContextVar[Iterator[int] | None] = ContextVar("poptorch_numbers", default=None)
_HINTS: ContextVar[tuple[Hint, ...]] = ContextVar("poptorch_hints", default=())
_PATHS: ContextVar[Sequence[str]] = ContextVar("poptorch_paths", default=("",))
_TRAINING: ContextVar[bool] = ContextVar("poptorch_training", default=False)
_OWN_STATE: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("poptorch_state", default=nullcontext)


def is_capturing() -> bool:
    """Whether a model is being captured right now in this thread, or about to be."""
    return _ON_DEVICE.get()


def current_marks() -> LossMarks | None:
    """The losses marked so far by the capture that is going on."""
    return _MARKS.get()


def current_intercept() -> Intercept | None:
    """What sees the torch functions that `forward` calls in the capture that is going on."""
    return _INTERCEPT.get()


def current_placer() -> Placer | None:
    """What knows the blocks of the capture that is going on."""
    return _PLACER.get()


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


def next_number() -> int:
    """A number that the capture that is going on has not given out before."""
    return next(_NUMBERS.get() or count())


def current_hints() -> tuple[Hint, ...]:
    """What the user says about every op that runs now."""
    return _HINTS.get()


def start_hints(*hints: Hint) -> Token[tuple[Hint, ...]]:
    """Say something about every op from here on, in place of earlier hints of the same kinds; the token ends it."""
    kinds = {kind for kind, _ in hints}
    return _HINTS.set((*(hint for hint in _HINTS.get() if hint[0] not in kinds), *hints))


def leave_hints(before: Token[tuple[Hint, ...]]) -> None:
    """What was said before holds again."""
    _HINTS.reset(before)


def current_path() -> str:
    """The submodule of the model that runs now."""
    return _PATHS.get()[-1]


@contextmanager
def following_paths(paths: Sequence[str]) -> Iterator[None]:
    """The submodule that runs is always the last of these paths."""
    token = _PATHS.set(paths)
    try:
        yield
    finally:
        _PATHS.reset(token)


@contextmanager
def on_device() -> Iterator[None]:
    """Everything inside counts as running on the device, although no capture need be going on yet."""
    with _set(_ON_DEVICE, True):
        yield


@contextmanager
def capturing(
    marks: LossMarks,
    placer: Placer,
    intercept: Intercept,
    *,
    training: bool = False,
    own_state: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[None]:
    """Everything inside belongs to one capture; in a context of `own_state`, the module has its own tensors."""
    with (
        _set(_MARKS, marks),
        _set(_PLACER, placer),
        _set(_INTERCEPT, intercept),
        _set(_NUMBERS, count()),
        _set(_HINTS, ()),
        _set(_TRAINING, training),
        _set(_OWN_STATE, own_state),
        on_device(),
        silent(),
    ):
        yield


@contextmanager
def off_device() -> Iterator[None]:
    """Everything inside runs on the host, with real tensors, as if no capture were going on."""
    from poptorch.capture.private import disable_current_modes, disable_torch_function  # only known while tracing

    with (
        _OWN_STATE.get()(),
        _set(_ON_DEVICE, False),
        _set(_MARKS, None),
        _set(_PLACER, None),
        _set(_TRAINING, False),
        _set(_AUTOCAST, False),
        _set(_OWN_STATE, nullcontext),
        disable_current_modes(),
        disable_torch_function(),
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
