"""Functions of the user that run before and after every compilation, whichever model is compiled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle

from poptorch.capture import on_device
from poptorch.errors import HookError

Hook = Callable[[], object]

_BEFORE: OrderedDict[int, Hook] = OrderedDict()
_AFTER: OrderedDict[int, Hook] = OrderedDict()


def registerPreCompileHook(hook: Hook) -> RemovableHandle:
    """Call `hook()` before each model is compiled; the result's `remove()` ends that.

    >>> import poptorch, torch
    >>> handle = poptorch.registerPreCompileHook(lambda: print("compiling"))
    >>> poptorch.inferenceModel(torch.nn.ReLU(), poptorch.Options().engine("eager"))(torch.ones(1))
    compiling
    tensor([1.])
    >>> handle.remove()
    """
    return _register(hook, _BEFORE)


def registerPostCompileHook(hook: Hook) -> RemovableHandle:
    """Call `hook()` after `forward` of each model was captured, also if that failed; undone like a pre-compile hook."""
    return _register(hook, _AFTER)


def _register(hook: Hook, hooks: OrderedDict[int, Hook]) -> RemovableHandle:
    if not callable(hook):
        raise HookError(f"a compile hook must be callable, without arguments; {hook!r} is not.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


@contextmanager
def compile_hooks() -> Iterator[None]:
    """Run the hooks around a capture, in the order of their registration; for them it runs on the device."""
    with on_device():
        try:
            _call_all(_BEFORE)
            yield
        finally:
            _call_all(_AFTER)


def _call_all(hooks: OrderedDict[int, Hook]) -> None:
    for hook in list(hooks.values()):  # a hook may remove itself
        hook()
