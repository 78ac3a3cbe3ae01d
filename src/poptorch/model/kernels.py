"""Kernels for the programs of an executable: from the cache, or compiled while a display tells about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poptorch.compiler import is_dumping
from poptorch.engines import Engine, Kernel
from poptorch.engines.host import Observer, unobserved
from poptorch.executable import Executable, Program
from poptorch.model.display import Display, displaying
from poptorch.model.garbage import collecting_later, collecting_rarely
from poptorch.model.locking import COMPILING
from poptorch.store import Cache, compile_cached, find_cached
from poptorch.store.cache import count_ops

PHASE = "Compiling the programs"


@dataclass(frozen=True)
class Task:
    """Programs of an executable that need kernels, and where those may be kept."""

    executable: Executable
    programs: list[Program]
    cache: Cache | None
    observe: Observer
    shows_progress: bool

    def find(self, engine: Engine) -> dict[str, Kernel] | None:
        """Kernels that an engine has made before."""
        return find_cached(None if is_dumping() else self.cache, engine, self.executable)

    def compile(self, engine: Engine, display: Display | None = None) -> dict[str, Kernel]:
        """Kernels that an engine makes, unless they are in the cache; without a display, on one of its own."""
        if display is None:
            with COMPILING, displaying(self.shows_progress) as own:
                own.phase(PHASE)
                return self.compile(engine, own)
        cache = None if is_dumping() else self.cache  # whoever looks at passes wants to see them run
        shown = _ShownEngine(engine, display, self.estimate)
        return compile_cached(cache, shown, self.executable, self.programs, self.observe)

    @property
    def estimate(self) -> float | None:
        """How many seconds native code will take, as far as earlier compilations tell."""
        return None if self.cache is None else self.cache.durations.estimate(count_ops(self.programs))


@dataclass(frozen=True)
class _ShownEngine:
    """An engine that tells a display when it compiles native code."""

    engine: Engine
    display: Display
    estimate: float | None

    @property
    def name(self) -> str:
        return self.engine.name

    def compile(self, programs: Sequence[Program], observe: Observer = unobserved) -> dict[str, Kernel]:
        if self.engine.name != "inductor":
            with collecting_later():
                return self.engine.compile(programs, observe)
        with self.display.compiling(self.estimate), collecting_rarely():
            return self.engine.compile(programs, observe)
