"""Precompiled headers: what every generated file includes, compiled once per machine.

Nothing needs them: a file is compiled with a header if that is there, and takes a second longer if not. They are
built in the background, by one process at a time, under a name that nobody looks for until they are complete. One that
somebody else could have written is not used, since a compiler believes everything that such a file says.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from poptorch import environment
from poptorch._logging import logger
from poptorch.engines.compilers import Job, thread_limit

IN, OUT = "IN", "OUT.o"  # what stands for the source and the object file in a command
_SUFFIX, _PART = ".gch", ".part"
_MANY_THREADS = 4  # from which on a header is built while programs are compiled, and not after them
_FORGOTTEN = 30 * 24 * 3600.0  # seconds after which a header that nobody used is removed
_ABANDONED = 2 * 3600.0  # seconds after which nobody can still be writing a file


@dataclass(frozen=True)
class Header:
    """Some includes, and the command by which files that begin with them are compiled."""

    name: str
    includes: tuple[str, ...]
    command: tuple[str, ...]
    facts: str  # what else its content depends on: versions, and where they are

    @property
    def text(self) -> str:
        return "".join(f"#include <{name}>\n" for name in self.includes)

    @property
    def key(self) -> str:
        content = "\0".join([self.text, self.facts, *self.command])
        return f"{self.name}-{hashlib.sha256(content.encode()).hexdigest()[:24]}"


def machine_folder() -> Path:
    """The folder for what is made once per machine, private to this user; raises `OSError` if there cannot be one."""
    chosen = environment.MACHINE_DIR.read()
    try:
        folder = Path(chosen) if chosen else platformdirs.user_cache_path("poptorch", appauthor=False) / "machine"
    except RuntimeError as error:
        raise FileNotFoundError("there is no home directory") from error
    folder = folder.absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder):
        raise PermissionError(f"others can write to {folder}")
    return folder


def find(header: Header) -> str | None:
    """The file to include for a header that is compiled; None if there is none that can be trusted."""
    with contextlib.suppress(OSError):
        source = machine_folder() / f"{header.key}.h"
        compiled = _compiled(source)
        if _is_ours(source) and _is_ours(compiled) and source.read_text(encoding="utf-8") == header.text:
            os.utime(compiled)  # it is in use
            return str(source)
    return None


def _compiled(source: Path) -> Path:
    return source.with_name(source.name + _SUFFIX)


def _is_ours(path: Path) -> bool:
    """Whether only this user can have written a file, or into a folder."""
    status = path.lstat()
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def build(header: Header, job: Job) -> bool:
    """Compile a header, unless it is there or another process is at it; says whether it is there now."""
    if find(header) is not None:
        return True
    folder = machine_folder()
    try:
        with FileLock(folder / f"{header.key}.lock", timeout=0):
            if find(header) is None:
                _build(header, folder, job)
    except Timeout:
        return False
    return find(header) is not None


def _build(header: Header, folder: Path, job: Job) -> None:
    start = time.monotonic()
    source = folder / f"{header.key}.h"
    logger.info("compiling the header of %s, once for this machine, in the background", header.name)
    part = folder / f".{secrets.token_hex(6)}{_PART}"
    try:
        _write(source, header.text)
        command = ["-x", "c++-header", str(source), "-o", str(part)]
        job.run([*_without_files(header.command), *command], str(folder))
        part.chmod(0o600)
        part.replace(_compiled(source))
    finally:
        part.unlink(missing_ok=True)
    logger.info("compiled the header of %s in %.1f s", header.name, time.monotonic() - start)
    _clean(folder)


def _write(path: Path, text: str) -> None:
    """Put a small file in place at once; whatever was there is replaced, also if it was somebody else's."""
    part = path.with_name(f".{secrets.token_hex(6)}{_PART}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)


def _without_files(command: Sequence[str]) -> list[str]:
    """A command without its source, its output, and the wish to compile a source only."""
    return [word for word in command if word not in (IN, "-o", OUT, "-c")]


def _clean(folder: Path) -> None:
    """Remove what nobody has used for long, and what killed processes left."""
    now = time.time()
    for pattern, age in ((f".*{_PART}", _ABANDONED), (f"*{_SUFFIX}", _FORGOTTEN)):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > age:
                    path.unlink()
                    path.with_suffix("").unlink(missing_ok=True)


class Background:
    """Builds headers in a thread of its own, at most once per process and header."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: set[str] = set()
        self._job: Job | None = None
        self._thread: threading.Thread | None = None

    def begin(self, headers: Iterable[Header], *, while_compiling: bool) -> None:
        """Build the headers that are not there; with few threads only after the programs that somebody waits for."""
        if while_compiling and thread_limit() < _MANY_THREADS:
            return
        with self._lock:
            wanted = [header for header in headers if header.key not in self._begun]
            self._begun.update(header.key for header in wanted)
            if not wanted or (self._thread is not None and self._thread.is_alive()):
                return
            self._job = Job(is_urgent=False)
            self._thread = threading.Thread(target=_build_all, args=(wanted, self._job), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        with self._lock:
            if self._job is not None:
                self._job.stop()

    def wait(self, seconds: float) -> None:
        """Let what is being built become complete."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)


BACKGROUND = Background()


def _build_all(headers: Sequence[Header], job: Job) -> None:
    for header in headers:
        try:
            build(header, job)
        except Exception as error:  # nothing depends on it
            logger.debug("no precompiled header of %s: %s", header.name, error)
            if job.is_stopped:
                return
