"""Two tiers: a model runs on the eager engine at once, and goes on with native code between two later calls.

Results differ as those of the two engines do, by rounding. Random numbers, weights, the optimisers' state and the
buffers of replicas go on exactly; whether a call runs before or after the change depends on the time it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from poptorch._logging import logger
from poptorch.compiler import is_dumping
from poptorch.engines import Engine, Kernel, TieredEngine, stays_here
from poptorch.errors import EngineError, explain
from poptorch.executable import Program
from poptorch.ir.serial import FormatError, op_named, target_name
from poptorch.model.background import Answer, BackgroundCompilation, Verdict
from poptorch.model.display import Display
from poptorch.model.kernels import Task

Kernels = Mapping[str, Kernel]


@dataclass(frozen=True)
class Made:
    """Kernels to begin with, the engine that they are of, and what will take their place."""

    kernels: Kernels
    engine: str
    upgrade: Upgrade | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """If the block fails, nobody will run the kernels: then end what is compiled in the background."""
        try:
            yield
        except BaseException:
            if self.upgrade is not None:
                self.upgrade.close()
            raise


class Upgrade:
    """Native code that is on its way, in place of the kernels of a program."""

    def __init__(self, compilation: BackgroundCompilation, engine: Engine, task: Task) -> None:
        self._compilation, self._engine, self._task = compilation, engine, task
        self.is_over = False

    @property
    def engine(self) -> str:
        """The name of the engine that runs the model afterwards."""
        return self._engine.name

    def poll(self) -> Kernels | None:
        """The native kernels, once they are there."""
        return self._accept(self._compilation.poll())

    def wait(self, seconds: float) -> Kernels | None:
        """The native kernels, if they are there in time."""
        return self._accept(self._compilation.wait(seconds))

    def stop(self) -> None:
        """End the work in the background; it begins again when somebody asks for its result."""
        self._compilation.stop()

    def close(self) -> None:
        self._compilation.close()

    def _accept(self, answer: Answer | None) -> Kernels | None:
        if answer is None:
            return None
        self.is_over = True
        if answer.verdict is Verdict.READY:
            return answer.kernels
        if answer.verdict is Verdict.FAILED:
            _warn(answer.reason)
            return None
        logger.info("native code is made in this process, which pauses the model: %s", answer.reason)
        try:
            return self._task.compile(self._engine)
        except EngineError as error:
            _warn(error.message)
            return None


def begin(engine: TieredEngine, task: Task, display: Display) -> Made:
    """What a model begins with: native code that was compiled before, or the first tier and an upgrade."""
    first, later = engine.first, engine.later
    found = task.find(later)
    if found is not None:
        return Made(found, later.name)
    compilation = None if is_dumping() else _in_background(task)  # whoever looks at passes wants to see them run
    if compilation is not None:
        takes = "" if task.estimate is None else f", which takes about {task.estimate:.0f} s"
        logger.info("the model runs on the eager engine while native code is compiled in the background%s", takes)
        made = Made({}, first.name, Upgrade(compilation, later, task))
        with made.in_use():
            compilation.poll()
            return replace(made, kernels=task.compile(first, display))
    try:
        return Made(task.compile(later, display), later.name)
    except EngineError as error:
        _warn(error.message)
    return Made(task.compile(first, display), first.name)


def _in_background(task: Task) -> BackgroundCompilation | None:
    """A compilation in another process; None if the programs have to be compiled where they are used."""
    try:
        for program in task.programs:
            _check_travels(program)
        names = [program.name for program in task.programs]
        return BackgroundCompilation(task.executable, names, None if task.cache is None else task.cache.folder)
    except (FormatError, OSError) as error:
        logger.info("native code is made before the first call, because another process could not make it: %s", error)
        return None


def _check_travels(program: Program) -> None:
    """Raise `FormatError` if another process could not read a program, or could not give its code away."""
    if stays_here(program):
        raise FormatError(f"the {program.name} program calls Python on its way")
    for node in program.graph.ops.nodes:
        if node.op == "call_function":
            op_named(target_name(node.target))


def _warn(reason: str) -> None:
    what = "native code could not be compiled: the model goes on with the eager engine, more slowly."
    logger.warning("%s", explain(what, reason=reason, fix="Options.engine('eager') saves the attempt"))
