"""The inductor engine: native code for the programs of an executable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poptorch import environment
from poptorch._logging import logger
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
from poptorch.errors import EngineError, explain
from poptorch.executable import Program
from poptorch.ir import StepGraph


@dataclass(frozen=True)
class InductorEngine:
    name: str = "inductor"

    def compile(self, programs: Sequence[Program], observe: Observer = unobserved) -> dict[str, Kernel]:
        keep_freed_memory()
        images = convolution_weights(program.graph for program in programs)
        return {program.name: self._compile(program, images, observe) for program in programs}

    def _compile(self, program: Program, images: frozenset[str], observe: Observer) -> Kernel:
        """Native code for a program, or what PyTorch runs op by op if Inductor cannot generate any."""
        host = Host(program.fixed, images)
        try:
            return _attempt(program, host, observe)
        except Exception as error:
            problem = broken()
            if problem is not None or not environment.FALLBACK.flag():
                raise _not_compiled(program, error, problem) from error
            logger.warning("%s", _falling_back(program, error))
        return EagerEngine().compile_one(program, observe)


def _attempt(program: Program, host: Host, observe: Observer) -> NativeKernel:
    """Native code with all optimisations or, if Inductor fails, with fewer."""
    try:
        return _kernel(program, run_host_passes(program.graph, host, NATIVE, observe), host)
    except Exception as error:
        logger.debug("compiling the %s program again with fewer optimisations: %s", program.name, first_line(error))
    graph = run_host_passes(program.graph, host, CAREFUL, observe)
    return _kernel(program, graph, host, is_careful=True)


def _kernel(program: Program, graph: StepGraph, host: Host, *, is_careful: bool = False) -> NativeKernel:
    """Generate code for a host graph: for what the calls in it share, and for each graph that they call."""
    cut = cut_at_calls(graph)
    images = any(spec.owner in host.channels_last for spec in program.state)
    called: dict[str, NativeCode] = {}
    for name in dict.fromkeys(call.graph for call in cut.calls):
        called[name] = generate(graph.graphs[name], is_careful=is_careful)
    if called:
        logger.debug("%s: %d pieces of %d patterns", program.name, len(cut.calls), len(called))
    return NativeKernel(
        HostState.of(program, graph),
        changed_strides(program, graph),
        graph.graphs.get(DRAWS),
        cut,
        None if cut.shared is None else generate(cut.shared, has_images=images, is_careful=is_careful),
        called,
        returned_count(graph),
        written_positions(graph),
    )


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
