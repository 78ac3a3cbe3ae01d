"""`Attribute`: notes of the user on the operations of a model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.fx import traceback as fx_traceback

from poptorch.capture import is_capturing

KEY = "poptorch_attributes"  # in Node.meta["custom"]


class Attribute:
    """Attach keys and values to the operations inside; they change no result. Outside a compiled model it does nothing.

    Inner attributes hide outer ones of the same name until they end.

    >>> import poptorch
    >>> with poptorch.Attribute(__outline={"layer": "embedding"}):
    ...     pass  # operations of forward
    """

    def __init__(self, **attributes: Any) -> None:
        self._attributes = attributes
        self._active: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        if is_capturing():
            outer = fx_traceback.get_current_meta().get("custom", {}).get(KEY, {})
            self._active = fx_traceback.annotate({KEY: {**outer, **self._attributes}})
        self._active.__enter__()

    def __exit__(self, *exception: Any) -> None:
        active, self._active = self._active, nullcontext()
        active.__exit__(*exception)
