"""What a LightningModule has in place of some of its attributes while one of its steps is captured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from poptorch.lightning.recording import COUNTS, Recorder, contents, is_metric

_ABSENT = object()
_METRIC_METHODS = ("forward", "update", "compute", "reset")
_STAGE = ("sanity_checking", "state")  # what tells the sanity check from a validation
_PLAIN = (str, int, float, list, dict, Path)


@contextmanager
def substituted(module: Any, recorder: Recorder) -> Iterator[None]:
    """Let the recorder see what a step logs, gives to metrics, and reads from its module and trainer."""
    trainer = CapturedTrainer(recorder.trainer, recorder)
    changes: list[tuple[dict[str, Any], str, Any]] = [(vars(module), "log", recorder.log)]
    for inner in module.modules():
        if vars(inner).get("_trainer") is recorder.trainer:
            changes.append((vars(inner), "_trainer", trainer))
    for metric in _metrics_of(module):
        changes += [(vars(metric), name, partial(recorder.call_metric, metric, name)) for name in _METRIC_METHODS]
    changes += [(names, name, _accept) for names, name in _checks_of_metrics()]
    kind = type(module)
    before = [names.get(name, _ABSENT) for names, name, _ in changes]
    try:
        for names, name, value in changes:
            names[name] = value
        object.__setattr__(module, "__class__", _watched(kind, recorder))
        yield
    finally:
        object.__setattr__(module, "__class__", kind)
        for (names, name, _), value in zip(changes, before, strict=True):
            if value is _ABSENT:
                names.pop(name, None)
            else:
                names[name] = value


def _metrics_of(module: Any) -> list[Any]:
    """The metrics of a module: submodules, and what it has in lists and dictionaries."""
    boxes = [box.values() if isinstance(box, dict) else box for box in contents(module).values()]
    loose = [inner for box in boxes for value in box if is_metric(value) for inner in value.modules()]
    found = {id(inner): inner for inner in (*module.modules(), *loose) if is_metric(inner)}
    return list(found.values())


def _accept(*args: Any, **kwargs: Any) -> None:
    """Stands in for a check of values."""


def _checks_of_metrics() -> list[tuple[dict[str, Any], str]]:
    """Where functions of torchmetrics look up the checks of their arguments' values.

    These checks read values, such as how many different labels there are, which would become part of the program.
    """
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("torchmetrics.functional") and m]
    return [(vars(m), name) for m in modules for name in vars(m) if name.endswith("_tensor_validation")]


def _watched(kind: type, recorder: Recorder) -> type:
    """A class like this one that tells which Python values of an object are read: they become part of the program."""
    if any("__init_subclass__" in vars(base) for base in kind.__mro__[:-1]):
        return kind  # making a subclass would run code of the user's

    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        value = super(watched, self).__getattribute__(name)
        if name in object.__getattribute__(self, "__dict__"):
            recorder.note_attribute(name, value)
        return value

    names = {
        "__getattribute__": __getattribute__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    watched: Any = type(kind)(kind.__name__, (kind,), names)
    return watched


class CapturedTrainer:
    """What a step finds as its trainer: the trainer, except that numbers that change are tensors."""

    def __init__(self, trainer: Any, recorder: Recorder) -> None:
        object.__setattr__(self, "_trainer", trainer)
        object.__setattr__(self, "_recorder", recorder)

    def __getattr__(self, name: str) -> Any:
        if name in COUNTS:
            count = self._recorder.count(name)
            if count is not None:
                return count
        if name in _STAGE:
            self._recorder.note_stage()
        value = getattr(self._trainer, name)
        if name == "loggers":
            return [CapturedLogger(logger, self._recorder) for logger in value]
        return CapturedLogger(value, self._recorder) if name == "logger" and value is not None else value

    def __setattr__(self, name: str, value: Any) -> None:
        self._recorder.package.warn(
            f"a compiled step sets `trainer.{name}`. It runs in Python only while it is compiled, so this happens "
            "once: do it in a hook such as `on_train_batch_end`."
        )
        setattr(self._trainer, name, value)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._trainer)


class CapturedLogger:
    """What a step finds as its logger, or as its `experiment`: what it calls there is called after each batch."""

    def __init__(self, target: Any, recorder: Recorder) -> None:
        self._target, self._recorder = target, recorder

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if callable(value):
            return partial(self._recorder.call_logger, self._target, name)
        return value if value is None or isinstance(value, _PLAIN) else CapturedLogger(value, self._recorder)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._target)
