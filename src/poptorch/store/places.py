"""Folders of the user, as the platform has them."""

from __future__ import annotations

from pathlib import Path

import platformdirs


def cache_place() -> Path:
    """For what can be made again; raises `OSError` for a user without a home."""
    return _absolute(platformdirs.user_cache_path("poptorch", appauthor=False))


def state_place() -> Path:
    """For what has to stay; raises `OSError` for a user without a home."""
    return _absolute(platformdirs.user_state_path("poptorch", appauthor=False))


def _absolute(path: Path) -> Path:
    if not path.is_absolute():  # the sign for the home directory is still in it
        raise FileNotFoundError("there is no home directory")
    return path
