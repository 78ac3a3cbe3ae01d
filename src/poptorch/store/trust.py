"""Whose native code this is: a keyed checksum that only this user can make, on this machine.

Loading code runs it. So code from disk is used only if it carries the checksum of a key that lies in a private folder
of the user; whoever can read that key could run code as this user anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import platform
import secrets
import stat
from pathlib import Path

from poptorch._logging import warn_once
from poptorch.store.places import state_place

_KEY_NBYTES = 32
_PURPOSE = b"poptorch native code 1\0"


def sign(content: bytes) -> str | None:
    """The checksum that says that this user has made this content; None if there is no place for a key."""
    try:
        return _checksum(_key(), content)
    except OSError as error:
        warn_once(f"native code cannot be kept: there is no private place for a key ({error}).")
        return None


def is_ours(content: bytes, checksum: object) -> bool:
    """Whether this user has made this content, on this machine."""
    try:
        return isinstance(checksum, str) and hmac.compare_digest(_checksum(_key(), content), checksum)
    except (OSError, TypeError):
        return False


def _checksum(key: bytes, content: bytes) -> str:
    return hmac.new(key, _PURPOSE + _machine() + b"\0" + content, hashlib.sha256).hexdigest()


def _machine() -> bytes:
    """A name for this machine: code that another one made does not count, even if they share the user's files."""
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_bytes().strip()
    return platform.node().encode()


def key_file() -> Path:
    """Where the key is."""
    return state_place() / "keys" / "native-code"


def _key() -> bytes:
    """The key of this user, made when it is first needed; raises `OSError` if there is no private place for it."""
    path = key_file()
    _make_private(path.parent)
    for _ in range(3):
        found = _read(path)
        if found is not None:
            return found
        _make_key(path)
    raise PermissionError(f"{path} cannot be made private")


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)


def _read(path: Path) -> bytes | None:
    """The key, if it is one that nobody else could have read; whatever else is there is removed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        is_private = status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077 == 0
        key = file.read(_KEY_NBYTES + 1)
    if is_private and len(key) == _KEY_NBYTES:
        return key
    path.unlink()
    return None


def _make_key(path: Path) -> None:
    """Put a new key in place, unless another process was faster; readers never see half of one."""
    temporary = path.with_name(f".{secrets.token_hex(6)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_NBYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
