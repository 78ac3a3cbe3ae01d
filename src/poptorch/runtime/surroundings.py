"""What the host has switched on around a call must not change what a program computes: it was captured before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Surroundings:
    """The switches of PyTorch on which ops depend, as they were when a program was made."""

    def __init__(self) -> None:
        self._default_type = torch.get_default_dtype()

    @property
    def differ(self) -> bool:
        """Whether ops would compute something else now. What a program casts by itself needs no autocasting."""
        return torch.is_autocast_enabled("cpu") or torch.get_default_dtype() is not self._default_type

    @contextmanager
    def restored(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        with torch.autocast("cpu", enabled=False):
            torch.set_default_dtype(self._default_type)
            try:
                yield
            finally:
                torch.set_default_dtype(before)
