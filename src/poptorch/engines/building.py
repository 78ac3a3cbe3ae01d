"""One module of native code for a program: kernels, which are compiled as they come, and the code that calls them.

Kernels do arithmetic on memory, include the headers for vectors, and are optimised as far as the compiler can. The code
that calls them is long and simple: optimising it takes much time and gains nothing. Both are compiled in parallel.

A program has one function for each of its parts. They share files and are linked once, because most of the time for a
short file, and all of it for a link, has nothing to do with what is in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from poptorch.engines.code import Library
from poptorch.engines.compilers import Job
from poptorch.engines.headers import BACKGROUND, IN, OUT, Header, find

_ENTRY = "inductor_entry_cpp"  # what Inductor calls the function for Python, its module, and what makes this
_INCLUDE = re.compile(r"^\s*#include .*$", re.MULTILINE)
_BATCH_LINES = 700  # in a file: more files use more processors, but each costs a start
_BATCH_LINES_PARSING = 2000  # the same where each file has to read all headers
_WAIT_SECONDS = 2 * 3600.0
T = TypeVar("T")


@dataclass(frozen=True)
class Tools:
    """How parts are compiled, and linked to one module: commands in which `IN` and `OUT.o` stand for files."""

    kernels: Header
    calls: Header
    link: tuple[str, ...]

    @property
    def headers(self) -> tuple[Header, Header]:
        return self.kernels, self.calls


class Build:
    """A module that is being built. Threads wait for compilers, so that the next part can be generated meanwhile."""

    def __init__(self, find_tools: Callable[[], Tools], objects: Path) -> None:
        self._find_tools, self._objects = find_tools, objects
        self._job = Job()
        self._waiting: list[str] = []  # kernels that are not being compiled yet
        self._waiting_calls: list[str] = []
        self._parts: list[Future[Path]] = []
        self._linked: Future[bytes] | None = None
        self.entries: list[str] = []  # the functions for Python
        self.kernels = 0  # since the last of them
        self.library = Library(self.content, self.entries)
        open_builds = _OPEN.get()
        if open_builds is not None:
            open_builds.append(self)

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="poptorch-build-")

    @cached_property
    def tools(self) -> Tools:
        """They are looked for when the first part comes."""
        tools = self._find_tools()
        BACKGROUND.begin(tools.headers, while_compiling=True)
        return tools

    def add_kernel(self, source: str) -> None:
        """Compile one more kernel, together with some others."""
        self._waiting.append(source)
        self.kernels += 1
        self._compile_long(self._waiting, self.tools.kernels)

    def add_calls(self, source: str) -> None:
        """Compile the code that calls the kernels since the last such code, as one more function for Python."""
        entry = f"{_ENTRY}_{len(self.entries)}"
        includes = "\n".join(dict.fromkeys(_INCLUDE.findall(source)))
        own = _INCLUDE.sub("", source).replace(_ENTRY, entry)
        self._waiting_calls.append(f"{includes}\nnamespace of_{entry} {{\n{own}\n}}\n")
        self.entries.append(entry)
        self.kernels = 0
        self._compile_long(self._waiting_calls, self.tools.calls)

    def _compile_long(self, waiting: list[str], header: Header) -> None:
        """Compile what waits if it is worth a file."""
        limit = _BATCH_LINES_PARSING if find(header) is None else _BATCH_LINES
        if sum(text.count("\n") for text in waiting) >= limit:
            self._compile_all(waiting, header)

    def _compile_all(self, waiting: list[str], header: Header) -> None:
        if waiting:
            self._compile("\n".join(waiting), header)
            waiting.clear()

    def _compile(self, source: str, header: Header) -> None:
        self._parts.append(in_thread(partial(self._object, source, header, self._folder.name)))

    def _object(self, source: str, header: Header, folder: str) -> Path:
        """The object file for a source: one that was kept, or a new one."""
        name = hashlib.sha256("\0".join([header.key, source]).encode()).hexdigest()
        kept = self._objects / f"{name}.o"
        if _is_usable(kept):
            return kept
        path, made = Path(folder, f"{name}.cpp"), Path(folder, f"{name}.o")
        path.write_text(source, encoding="utf-8")
        compiled = find(header)
        include = [] if compiled is None else ["-include", compiled]
        files = {IN: str(path), OUT: str(made)}
        self._job.run([*(files.get(word, word) for word in header.command), *include], folder)
        with contextlib.suppress(OSError):
            part = kept.with_name(f".{name}.{os.getpid()}.{threading.get_ident()}")
            part.write_bytes(made.read_bytes())
            part.replace(kept)
        return made

    def finish(self) -> None:
        """Nothing is added any more: compile the rest, and link everything, if there is anything."""
        if self.entries:
            self._compile_all(self._waiting, self.tools.kernels)
            self._compile_all(self._waiting_calls, self.tools.calls)
            self._linked = in_thread(self._link)

    def content(self) -> bytes:
        """The module, as soon as all of it is built."""
        assert self._linked is not None, "a part is missing"
        with self.ending_with_us():
            return self._linked.result(_WAIT_SECONDS)

    def _link(self) -> bytes:
        try:
            objects = [str(part.result(_WAIT_SECONDS)) for part in self._parts]
            made = Path(self._folder.name, "module.so")
            files = {IN: objects, OUT: [str(made)]}
            self._job.run([word for words in self.tools.link for word in files.get(words, [words])], self._folder.name)
            return made.read_bytes()
        finally:
            self._clean()

    def _clean(self) -> None:
        """End compilers whose results nobody needs, because another part failed or nobody waits, and remove files."""
        self._job.stop()
        for part in self._parts:
            with contextlib.suppress(Exception):
                part.result(_WAIT_SECONDS)
        self._folder.cleanup()

    def begin_headers(self) -> None:
        """Let the headers of this module be compiled for the next one, now that this one is done."""
        if self._parts:
            BACKGROUND.begin(self.tools.headers, while_compiling=False)

    @contextmanager
    def ending_with_us(self) -> Iterator[None]:
        """If the block is left by an exception, such as an interrupt, no compiler of ours goes on."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all compilers; whoever waits for the module gets an error."""
        self._job.stop()
        BACKGROUND.stop()
        if self._parts and self._linked is None:
            self._clean()


def _is_usable(path: Path) -> bool:
    """Whether a file is there that nobody else can have written."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread, which does not keep Python from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


_OPEN: ContextVar[list[Build] | None] = ContextVar("poptorch_builds", default=None)
_CURRENT: ContextVar[Build | None] = ContextVar("poptorch_build", default=None)


def current_build() -> Build:
    """What the code that is being generated now goes to."""
    build = _CURRENT.get()
    assert build is not None, "code is generated outside of a build"
    return build


@contextmanager
def ending_builds_with_us() -> Iterator[list[Build]]:
    """Gives the list of builds that begin inside. If an exception, such as an interrupt, ends the block, they end."""
    builds: list[Build] = []
    token = _OPEN.set(builds)
    try:
        yield builds
    except BaseException:
        for build in builds:
            build.stop()
        raise
    finally:
        _OPEN.reset(token)


@contextmanager
def building(build: Build) -> Iterator[None]:
    """Let code that is generated inside become this module; if that fails, its compilers end."""
    token = _CURRENT.set(build)
    try:
        with build.ending_with_us():
            yield
    finally:
        _CURRENT.reset(token)
