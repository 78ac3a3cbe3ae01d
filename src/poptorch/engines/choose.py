"""Which engine runs a model: what the options ask for, or the environment, or what the machine can do."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from poptorch import environment
from poptorch._logging import warn_once
from poptorch.engines import toolchain
from poptorch.engines.eager import EagerEngine
from poptorch.engines.engine import Engine, Kernel
from poptorch.engines.host import Observer, unobserved
from poptorch.engines.toolchain import CannotBuild, Problem
from poptorch.errors import Error, explain
from poptorch.executable import Program

ENGINES = ("inductor", "eager", "tiered")


def choose_engine(requested: str | None) -> Engine:
    """The engine that the options, the environment or the machine ask for, in this order."""
    name = requested or environment.ENGINE.read()
    if name and name not in ENGINES:
        raise Error(f"{environment.ENGINE.name} is {name!r}, but the engines are {', '.join(map(repr, ENGINES))}.")
    if name == "eager":
        return EagerEngine()
    problem = toolchain.without_asserts()
    if problem is not None:
        return _instead(EagerEngine(), problem)  # even if native code was asked for: better slow than wrong
    problem = toolchain.missing()
    if problem is not None and name == "inductor":
        what = f"the inductor engine was asked for, but {problem.what}."
        raise CannotBuild(explain(what, fix=f"{problem.fix}; or ask for the eager engine"), problem)
    if problem is not None:
        return _instead(EagerEngine(), problem)
    if name == "tiered":
        return TieredEngine()
    return NativeEngine() if name else NativeWherePossible(NativeEngine(), EagerEngine())


@dataclass(frozen=True)
class NativeEngine:
    """The inductor engine, which takes seconds to import: so only when there is something to compile."""

    name: str = "inductor"

    def compile(self, programs: Sequence[Program], observe: Observer = unobserved) -> dict[str, Kernel]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch's own code, which users can do nothing about
            from poptorch.engines.inductor import InductorEngine
        return InductorEngine().compile(programs, observe)


@dataclass(frozen=True)
class TieredEngine:
    """The eager engine for now; whoever runs the programs gets native code for them meanwhile, and exchanges it."""

    name: str = "tiered"
    first: EagerEngine = field(default_factory=EagerEngine)
    later: NativeEngine = field(default_factory=NativeEngine)

    def compile(self, programs: Sequence[Program], observe: Observer = unobserved) -> dict[str, Kernel]:
        return self.first.compile(programs, observe)


class NativeWherePossible:
    """Native code by default; on a machine that turns out not to be able to build it, the other engine from then on."""

    def __init__(self, native: Engine, other: Engine) -> None:
        self._engine, self._other = native, other

    @property
    def name(self) -> str:
        return self._engine.name

    def compile(self, programs: Sequence[Program], observe: Observer = unobserved) -> dict[str, Kernel]:
        try:
            return self._engine.compile(programs, observe)
        except CannotBuild as error:
            self._engine = _instead(self._other, error.problem)
            return self._engine.compile(programs, observe)


def _instead(engine: Engine, problem: Problem) -> Engine:
    """This engine, after a warning that says why it is not another one."""
    consequence = f"models run on the {engine.name} engine, which is slower. For native code {problem.fix}."
    warn_once(f"{problem.what}: {consequence}")
    return engine
