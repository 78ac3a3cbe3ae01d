"""The cache: a folder of native code, one file for each set of programs, engine, version and processor.

Whatever is wrong with the folder or with a file in it, a model compiles as if there were no cache, after one warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from poptorch import environment
from poptorch._logging import logger, warn_once
from poptorch.engines import Engine, Kernel, surroundings
from poptorch.errors import Error, FileError
from poptorch.executable import Executable, Program
from poptorch.ir import StepGraph
from poptorch.ir.serial import FormatError
from poptorch.store.atomic import remove_leftovers
from poptorch.store.container import Container, read_container, write_container
from poptorch.store.durations import Duration, Durations
from poptorch.store.files import about_us, code_parts, programs_digest, read_kernels, why_not_usable
from poptorch.store.places import cache_place

SUFFIX = ".poptorch-code"
_PATIENCE = 900.0  # seconds to wait for another process that compiles the same
_MISSES, _MISSES_KEPT = "misses.json", 20
_LOCKS = "locks"
T = TypeVar("T")
Observer = Callable[[str, StepGraph], None]


def cache_folder(chosen: str | None) -> Path:
    """The folder that the options name, or that of the platform; raises `OSError` if there is no home."""
    return Path(chosen) if chosen else cache_place()


@dataclass(frozen=True)
class Wanted:
    """What is looked for: everything that decides about the code, by name, and the program in words."""

    facts: Mapping[str, str]
    program: str

    @classmethod
    def of(cls, executable: Executable, engine: str) -> Wanted:
        """Raises `FormatError` for a program that has no name, because it draws from a generator of the user."""
        facts = {"program": programs_digest(executable), "engine": engine, **surroundings()}
        ops = ", ".join(f"{program.name} of {program.graph.count_ops()} ops" for program in executable.programs)
        return cls(facts, f"{executable.interface.arguments}: {ops}")

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.facts), sort_keys=True).encode()).hexdigest()


class Cache:
    """One folder of compiled programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def durations(self) -> Durations:
        """How long programs took to compile."""
        return Durations(self.folder)

    def path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def entries(self) -> list[Path]:
        """All files of programs, the one that was used least recently first."""
        found = [(entry.stat().st_mtime, entry) for entry in self.folder.glob(f"*{SUFFIX}")]
        return [entry for _, entry in sorted(found)]

    def find(self, wanted: Wanted) -> dict[str, Kernel] | None:
        """The kernels for what is wanted; None if they are not there. Raises if something is there that is unusable."""
        path = self.path(wanted.key)
        if not path.exists():
            return None
        container, program = read_container(path), wanted.facts["program"]
        kernels = read_kernels(container, program)
        if kernels is None:
            raise FileError(f"the code in {path.name} is not used: {why_not_usable(container, program)}.")
        with contextlib.suppress(OSError):
            os.utime(path)
        return kernels

    def add(self, wanted: Wanted, kernels: Mapping[str, Kernel]) -> None:
        """Keep these kernels, if they can be kept, and make room for them."""
        parts = code_parts(wanted.facts["program"], kernels)
        if parts:
            about = {**about_us(), "kind": "cache", "facts": dict(wanted.facts), "program": wanted.program}
            write_container(self.path(wanted.key), about, parts)
            self.make_room(environment.CACHE_SIZE.integer() * 2**20, besides=self.path(wanted.key))

    def make_room(self, most_nbytes: int, besides: Path | None = None) -> list[Path]:
        """Remove the files that were used least recently until the others fit; gives those that were removed."""
        entries = self.entries()
        total, removed = sum(entry.stat().st_size for entry in entries), list[Path]()
        for entry in entries:
            if total <= most_nbytes:
                break
            if entry != besides:
                total -= entry.stat().st_size
                entry.unlink(missing_ok=True)
                removed.append(entry)
        return removed

    def note_miss(self, wanted: Wanted) -> None:
        """Remember what was not found, for `poptorch cache explain`."""
        new = {"time": time.time(), "facts": dict(wanted.facts), "program": wanted.program}
        kept = [*self.misses(), new][-_MISSES_KEPT:]
        (self.folder / _MISSES).write_text(json.dumps(kept), encoding="utf-8")

    def misses(self) -> list[dict[str, Any]]:
        """What was not found lately, the last one at the end."""
        try:
            found = json.loads((self.folder / _MISSES).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        keys = {"time", "facts", "program"}
        return [miss for miss in found if isinstance(miss, dict) and miss.keys() == keys] if _is_list(found) else []

    def about(self, entry: Path) -> Mapping[str, Any]:
        """What the manifest of an entry says; raises `FileError` if it is damaged."""
        return self.open(entry).about

    def open(self, entry: Path) -> Container:
        return read_container(entry)

    @contextmanager
    def compiling(self, key: str) -> Iterator[None]:
        """Only one process at a time is inside for a key; a process that is killed lets the next one in.

        Where there are no locks, everybody is let in.
        """
        folder = self.folder / _LOCKS
        lock = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
            lock = FileLock(folder / f"{key[:2]}.lock", timeout=_PATIENCE)  # a few keys share one, so they stay few
            lock.acquire()
            logger.debug("cache file locked: %s", lock.lock_file)
        except (OSError, Timeout, NotImplementedError) as error:
            logger.debug("compiling without a lock: %s", error)
            lock = None
        try:
            yield
        finally:
            if lock is not None:
                with contextlib.suppress(OSError):
                    lock.release()
                    logger.debug("released the cache lock: %s", lock.lock_file)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def compile_cached(
    cache: Cache | None, engine: Engine, executable: Executable, programs: Sequence[Program], observe: Observer
) -> dict[str, Kernel]:
    """Kernels for programs of an executable: from the cache, or compiled and kept for the next time."""
    wanted = None if cache is None or engine.name != "inductor" else _wanted(executable, engine.name)
    if cache is None or wanted is None:
        return engine.compile(programs, observe)
    found = _carefully(lambda: cache.find(wanted), cache)
    if found is not None:
        logger.debug("the programs are in the cache: %s", cache.path(wanted.key))
        return found
    with cache.compiling(wanted.key):
        found = _carefully(lambda: cache.find(wanted), cache)
        if found is not None:
            return found
        _carefully(lambda: cache.note_miss(wanted), cache)
        begun = time.monotonic()
        kernels = engine.compile(programs, observe)
        cache.durations.add(Duration(count_ops(programs), time.monotonic() - begun))
        _carefully(lambda: cache.add(wanted, kernels), cache)
        return kernels


def count_ops(programs: Sequence[Program]) -> int:
    """How much there is to compile."""
    return sum(program.graph.count_ops() for program in programs)


def find_cached(cache: Cache | None, engine: Engine, executable: Executable) -> dict[str, Kernel] | None:
    """Kernels for an executable, if the cache has them."""
    wanted = None if cache is None else _wanted(executable, engine.name)
    return None if cache is None or wanted is None else _carefully(lambda: cache.find(wanted), cache)


def _wanted(executable: Executable, engine: str) -> Wanted | None:
    try:
        return Wanted.of(executable, engine)
    except FormatError as error:
        logger.debug("this program is not kept in the cache: %s", error)
        return None


def _carefully(action: Callable[[], T], cache: Cache) -> T | None:
    """What an action gives; None after one warning if the cache is not usable."""
    try:
        return action()
    except (OSError, Error) as error:
        what = error.message if isinstance(error, Error) else error
        warn_once(f"the cache in {cache.folder} cannot be used for a program, which is compiled instead: {what}")
    except Exception as error:  # whatever a file leads to that is ours by its checksum and yet cannot be loaded
        warn_once(f"a program in the cache in {cache.folder} cannot be used: {type(error).__name__}: {error}")
    return None
