"""Folders of the user, as the platform has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import platformdirs


def cache_place() -> Path:
    """For what can be made again; raises `OSError` for a user without a home."""
    return _found(platformdirs.user_cache_path)


def state_place() -> Path:
    """For what has to stay; raises `OSError` for a user without a home."""
    return _found(platformdirs.user_state_path)


def _found(place: Callable[..., Path]) -> Path:
    try:
        path = place("poptorch", appauthor=False)
    except RuntimeError as error:
        raise FileNotFoundError("there is no home directory") from error
    if not path.is_absolute():  # older releases leave the sign for the home directory in it
        raise FileNotFoundError("there is no home directory")
    return path
