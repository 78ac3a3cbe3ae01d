"""See every torch function that `forward` calls, before it becomes ops.

Each concern has a module of its own. Adapters change the arguments of a call: the device of the program, stand-ins for
tensors of the module, autocasting, operands of mixed types. Then a function that cannot be traced is replaced by one of
the same meaning, and what is a loss is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from poptorch.capture.functions import replacement
from poptorch.capture.losses import BUILT_IN, LossMarks
from poptorch.capture.private import disable_torch_function

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Adapter = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Arguments]


class Intercept(TorchFunctionMode):
    """Lets adapters have their say in order, and marks losses."""

    def __init__(self, adapters: Sequence[Adapter], marks: LossMarks) -> None:
        super().__init__()
        self._adapters, self._marks = adapters, marks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for adapt in self._adapters:
            args, kwargs = adapt(func, args, kwargs)
        called = replacement(func, (*args, *kwargs.values())) or func
        if func not in BUILT_IN:
            return called(*args, **kwargs)
        with disable_torch_function():  # a loss that is made of other losses counts once
            result = called(*args, **kwargs)
        return self._marks.mark(result, func.__name__)
