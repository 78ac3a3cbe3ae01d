"""The inductor engine: native code for the programs of an executable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, TypeVar

from poptorch import environment
from poptorch._logging import logger
from poptorch.engines.building import ending_builds_with_us
from poptorch.engines.calls import cut_at_calls
from poptorch.engines.code import NativeCode
from poptorch.engines.codegen import first_line, generate
from poptorch.engines.eager import EagerEngine
from poptorch.engines.engine import Kernel
from poptorch.engines.host import Host, Observer, run_host_passes, unobserved
from poptorch.engines.host_state import HostState, changed_strides
from poptorch.engines.memory import keep_freed_memory
from poptorch.engines.native import NativeKernel
from poptorch.engines.ops import returned_count, written_positions
from poptorch.engines.passes.channels_last import convolution_weights
from poptorch.engines.passes.draw_ahead import DRAWS
from poptorch.engines.passes.native import CAREFUL, NATIVE
from poptorch.engines.toolchain import CannotBuild, Problem, broken
from poptorch.engines.vectors import SEARCH
from poptorch.engines.wrapper import new_build
from poptorch.errors import EngineError, explain
from poptorch.executable import Program
from poptorch.ir import StepGraph
from poptorch.progress import working_on

T = TypeVar("T")


@dataclass(frozen=True)
class InductorEngine:
    name: str = "inductor"

    def compile(self, programs: Sequence[Program], observe: Observer = unobserved) -> dict[str, Kernel]:
        keep_freed_memory()
        images = convolution_weights(program.graph for program in programs)
        names = {p.name: f"program {n} of {len(programs)} ({p.name})" for n, p in enumerate(programs, start=1)}
        begun: dict[str, Callable[[], Kernel]] = {}
        kernels: dict[str, Kernel] = {}
        with ending_builds_with_us() as builds:  # while one program is compiled, the code of the next is generated
            for program in programs:
                with working_on(names[program.name]):
                    begun[program.name] = self._begin(program, images, observe)
            for name, finish in begun.items():
                with working_on(names[name]):
                    kernels[name] = finish()
        for build in builds:
            build.begin_headers()
        return kernels

    def _begin(self, program: Program, images: frozenset[str], observe: Observer) -> Callable[[], Kernel]:
        """Begin to compile a program; gives a function that waits for its native code.

        With all optimisations or, if Inductor fails, with fewer; or what PyTorch runs op by op if it fails again.
        """
        host = Host(program.fixed, images, environment.ALIKE_LAYERS.integer())
        first = _postponed(lambda: _kernel(program, run_host_passes(program.graph, host, NATIVE, observe), host))

        def finish() -> Kernel:
            try:
                return first()
            except Exception as error:
                logger.debug("compiling the %s program again, more carefully: %s", program.name, first_line(error))
            try:
                SEARCH.look_again()
                graph = run_host_passes(program.graph, host, CAREFUL, observe)
                return _kernel(program, graph, host, is_careful=True)()
            except Exception as error:
                problem = broken()
                if problem is not None or not environment.FALLBACK.flag():
                    raise _not_compiled(program, error, problem) from error
                logger.warning("%s", _falling_back(program, error))
            return EagerEngine().compile_one(program, observe)

        return finish


def _postponed(begin: Callable[[], Callable[[], T]]) -> Callable[[], T]:
    """Begin something that is finished later; an error on the way is raised then."""
    try:
        return begin()
    except Exception as error:
        return partial(_raise, error)


def _raise(error: Exception) -> NoReturn:
    raise error


def _kernel(program: Program, graph: StepGraph, host: Host, *, is_careful: bool = False) -> Callable[[], NativeKernel]:
    """Generate code for a host graph: for what the calls in it share, and for each graph that they call.

    It is being compiled when this returns: the function that this gives waits for it.
    """
    cut = cut_at_calls(graph)
    images = any(spec.owner in host.channels_last for spec in program.state)
    known = {**graph.graphs, **(cut.own or {})}
    names = sorted({part.graph for part in cut.parts}, key=lambda name: (-known[name].count_ops(), name))
    if not cut.is_whole:
        logger.debug("%s: %d parts of %d kinds", program.name, len(cut.parts), len(names))
    begun: dict[str, Callable[[], NativeCode]] = {}
    build = new_build()
    for number, name in enumerate(names, start=1):  # long ones first, so that what remains in the end is short
        with nullcontext() if cut.is_whole else working_on(f"part {number} of {len(names)}"):
            begun[name] = generate(known[name], build, has_images=images, is_careful=is_careful)
    build.finish()

    def finish() -> NativeKernel:
        return NativeKernel(
            HostState.of(program, graph),
            changed_strides(program, graph),
            graph.graphs.get(DRAWS),
            replace(cut, own=None),
            {name: code() for name, code in begun.items()},
            returned_count(graph),
            written_positions(graph),
        )

    return finish


def _not_compiled(program: Program, error: Exception, problem: Problem | None) -> EngineError:
    what = f"the inductor engine could not compile the {program.name} program: {first_line(error)}"
    fix = "run on the eager engine: Options.engine('eager') or POPTORCH_ENGINE=eager"
    if problem is None:
        only = f"{environment.FALLBACK.name}=1 does so for such programs only"
        return EngineError.from_backend(explain(what, fix=f"{fix}; {only}"))
    return CannotBuild.from_backend(explain(what, reason=problem.what, fix=f"{problem.fix}; or {fix}"), problem=problem)


def _falling_back(program: Program, error: Exception) -> str:
    return explain(
        f"the inductor engine could not compile the {program.name} program, which runs on the eager engine instead: "
        "the results are the same, but slower.",
        reason=first_line(error),
        fix=f"Options.engine('eager') saves the attempt; {environment.FALLBACK.name}=0 makes this an error",
    )
