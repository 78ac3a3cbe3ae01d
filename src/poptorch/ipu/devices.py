"""Taking and giving back emulated IPUs: the models of all processes of a user share them, as they would hardware.

Who has IPU k holds the lock file of IPU k. The operating system gives up the lock when a process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import gc
import getpass
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from filelock import FileLock, Timeout

from poptorch import environment
from poptorch._logging import logger, warn_once
from poptorch.errors import Error, explain
from poptorch.ipu.system import number_of_ipus

MOST_PER_MODEL = 64
_POLL, _REMIND = 0.25, 15.0  # seconds


def reserved_ipus(count: int, *, rounds_up: bool, insists: bool) -> int:
    """How many IPUs to reserve for a model that uses `count`: hardware, if one `insists` on it, has powers of two."""
    if count > MOST_PER_MODEL:
        raise _too_many(count)
    if count.bit_count() <= 1:
        return count
    rounded = 1 << count.bit_length()
    what = f"the use of {count} IPUs is asked for, but devices come with 1, 2, 4, … of them: a minimum of {rounded}."
    if rounds_up:
        warn_once(f"{what} {rounded - count} of them are reserved and stay idle.")
        return rounded
    if insists:
        raise Error(explain(what, fix=f"call Options.autoRoundNumIPUs(True), which reserves {rounded}"))
    warn_once(f"{what} Emulated, {count} will do; a real system needs Options.autoRoundNumIPUs(True).")
    return count


def _too_many(count: int) -> Error:
    return Error(
        explain(
            f"Too many IPUs requested ({count}): one process can use up to {MOST_PER_MODEL}.",
            fix="lower replicationFactor, use fewer IPUs per replica, or run several processes",
        )
    )


class Device:
    """Some emulated IPUs that belong to one model until it releases them."""

    def __init__(self, ipus: tuple[int, ...], locks: tuple[FileLock, ...]) -> None:
        self.ipus = ipus
        self._locks = locks

    def release(self) -> None:
        """Give the IPUs back; more than once does no harm."""
        for lock in self._locks:
            lock.release()

    def __reduce__(self) -> NoReturn:
        raise Error(
            explain(
                "a model that holds its IPUs cannot be copied or pickled: a copy would hold the same ones.",
                fix="copy the PyTorch module and wrap the copy, save() the model, or call detachFromDevice() before",
            )
        )

    def __repr__(self) -> str:
        return f"Device({', '.join(f'IPU {k}' for k in self.ipus)}, emulated)"


def acquire(count: int, first: int | None = None) -> Device:
    """Take `count` IPUs, those from number `first` on if it is given; wait for them if the environment says so."""
    available = number_of_ipus()
    wanted = f"device Id {first}" if first is not None else f"{count} IPU(s)"
    if available < (first or 0) + count or (first is not None and first < 0):
        raise Error(
            explain(
                f"Failed to acquire {wanted}: this machine has {available or 'no'} emulated IPUs.",
                fix=f"set {environment.NUM_IPUS.name}, or run on the IPU model: Options.useIpuModel(True)",
            )
        )
    return _take(count, first) or _retry(count, first, wanted)


def _retry(count: int, first: int | None, wanted: str) -> Device:
    gc.collect()  # a model that nobody uses any more may still be waiting for the collector
    device = _take(count, first)
    limit = environment.WAIT_LIMIT.integer() if environment.WAIT_FOR_IPU.flag() else 0
    deadline = time.monotonic() + limit
    reminder = 0.0
    while device is None and time.monotonic() < deadline:
        if time.monotonic() >= reminder:
            logger.warning("No IPU available, sleeping until another model gives one back (at most %d s).", limit)
            reminder = time.monotonic() + _REMIND
        time.sleep(_POLL)
        device = _take(count, first)
    if device is None:
        waited = f" within {limit} s ({environment.WAIT_LIMIT.name})" if limit else ""
        raise Error(
            explain(
                f"Failed to acquire {wanted}{waited}: other models use too many of {number_of_ipus()} emulated IPUs.",
                fix=(
                    "call detachFromDevice() or destroy() on a model that is not needed, "
                    f"set {environment.NUM_IPUS.name} higher, or {environment.WAIT_FOR_IPU.name}=1 to wait"
                ),
            )
        )
    return device


def _take(count: int, first: int | None) -> Device | None:
    """The device, or None if too few IPUs are free now."""
    candidates = range(number_of_ipus()) if first is None else range(first, first + count)
    folder = _folder()
    ipus, locks = list[int](), list[FileLock]()
    try:
        for ipu in candidates:
            if len(ipus) == count:
                break
            lock = FileLock(folder / f"ipu{ipu}.lock", thread_local=False)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            ipus.append(ipu)
            locks.append(lock)
    except OSError as error:
        Device(tuple(ipus), tuple(locks)).release()
        raise _unusable(folder, error) from error
    device = Device(tuple(ipus), tuple(locks))
    if len(ipus) < count:
        device.release()
        return None
    return device


def _folder() -> Path:
    """Where the lock files are; all processes of a user share it."""
    chosen = environment.IPU_LOCKS.read()
    try:
        folder = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"poptorch-ipus-{_user()}"
    except OSError as error:
        raise _unusable("for temporary files", error) from error
    try:
        if chosen:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            _keep_private(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def _keep_private(folder: Path) -> None:
    """Make a folder that is only ours, where everybody may make folders; raises OSError if it is not ours."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(
            f"it is {'a link' if stat.S_ISLNK(found.st_mode) else 'no folder'}, which somebody else put there"
        )
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        raise OSError(f"it belongs to the user with the number {found.st_uid}")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


def _user() -> str:
    """Who this is; a number, because not every user has a name."""
    return str(os.geteuid()) if hasattr(os, "geteuid") else getpass.getuser()


def _unusable(folder: Path | str, error: OSError) -> Error:
    return Error(
        explain(
            f"the folder {folder}, in which processes agree on who uses which IPU, cannot be used: {error}",
            fix=f"set {environment.IPU_LOCKS.name} to a folder that can be written to, "
            "or run on the IPU model, which nobody has to share: Options.useIpuModel(True)",
        )
    )
