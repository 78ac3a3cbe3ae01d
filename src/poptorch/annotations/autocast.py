"""`autocast`: a part of `forward` that runs in mixed precision."""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import Token
from typing import Any

from poptorch.capture import leave_autocast, start_autocast
from poptorch.errors import OptionError


class autocast(ContextDecorator):
    """Run the operations inside in float16 or float32, as `Precision.autocastPolicy` says for each.

    For a `with` block in `forward` or, as a decorator, for a whole function. `autocast(False)` excludes a part of a
    region, and `Precision.autocastEnabled(False)` switches all of them off. Outside a compiled model it does nothing.

    >>> import torch, poptorch
    >>> class Model(torch.nn.Module):
    ...     @poptorch.autocast()
    ...     def forward(self, x, weight):
    ...         return torch.softmax(x @ weight, dim=-1)
    >>> x = torch.ones(1, 2)
    >>> poptorch.inferenceModel(Model(), poptorch.Options().engine("eager"))(x, torch.eye(2)).dtype
    torch.float32
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"autocast takes True or False, not {enabled!r}")
        self._enabled = enabled
        self._before: list[Token[bool]] = []  # a decorated function may call itself

    def __enter__(self) -> None:
        self._before.append(start_autocast(self._enabled))

    def __exit__(self, *exception: Any) -> None:
        leave_autocast(self._before.pop())
