"""What a LightningModule has in place of some of its attributes while one of its steps is captured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from poptorch.lightning.recording import CapturedTrainer, Recorder, is_metric

_ABSENT = object()
_METRIC_METHODS = ("forward", "update", "compute", "reset")


@contextmanager
def substituted(module: Any, recorder: Recorder) -> Iterator[None]:
    """Let the recorder see what a step logs, gives to metrics, and reads from its module and trainer."""
    trainer = CapturedTrainer(recorder.trainer, recorder)
    changes: list[tuple[dict[str, Any], str, Any]] = [(vars(module), "log", recorder.log)]
    for inner in module.modules():
        if vars(inner).get("_trainer") is recorder.trainer:
            changes.append((vars(inner), "_trainer", trainer))
        if is_metric(inner):
            changes += [(vars(inner), name, partial(recorder.call_metric, inner, name)) for name in _METRIC_METHODS]
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
