"""Write files that are there as a whole or not at all, and remove what a killed process left behind.

A new file gets a temporary name, which its writer holds a lock on. The lock ends with the process, so whoever finds a
temporary file that nobody has locked may remove it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix: temporary files of killed processes stay
    fcntl = None

_SUFFIX = ".poptorch-part"


def write_atomically(path: Path, content: bytes) -> None:
    """Put a file in place, on the disk before it has its name; raises `OSError`, and leaves nothing behind then."""
    remove_leftovers(path.parent)
    temporary, descriptor = _create(path)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _create(path: Path) -> tuple[Path, int]:
    """A new file beside `path`, locked by this process."""
    while True:
        temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}{_SUFFIX}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if fcntl is None or (_lock(descriptor) and temporary.exists()):
            return temporary, descriptor
        os.close(descriptor)  # somebody removed it before it was locked


def _lock(descriptor: int) -> bool:
    assert fcntl is not None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: then nothing is ever removed
        return True
    return True


def remove_leftovers(folder: Path) -> int:
    """Remove what killed processes left in a folder; gives how many files that were."""
    if fcntl is None:
        return 0
    removed = 0
    for temporary in folder.glob(f".*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.unlink()
                removed += 1
            finally:
                os.close(descriptor)
    return removed


def _sync_folder(folder: Path) -> None:
    """Let the new name survive a loss of power, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
