"""The door to private parts of PyTorch for this folder: nothing else here imports them."""

# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch.func import vmap  # pyright: ignore[reportPrivateImportUsage]

_functorch = torch._C._functorch  # pyright: ignore[reportPrivateUsage]


@contextmanager
def refusing_unknown_ops() -> Generator[None]:
    """Inside, `vmap` raises for an op that it could only run for one slice after the other, with a warning."""
    before: bool = _functorch._is_vmap_fallback_enabled()
    _functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        _functorch._set_vmap_fallback_enabled(before)


__all__ = ["refusing_unknown_ops", "vmap"]
