"""The inductor engine: native code for the programs of an executable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from poptorch import environment
from poptorch._logging import logger
from poptorch.engines.calls import Cut, cut_at_calls
from poptorch.engines.codegen import NativeCode, first_line, generate
from poptorch.engines.eager import EagerEngine, copying
from poptorch.engines.engine import Kernel, Started
from poptorch.engines.host import Host, Observer, run_host_passes, unobserved
from poptorch.engines.host_state import HostState, Strides, changed_strides
from poptorch.engines.memory import keep_freed_memory
from poptorch.engines.native_draws import Draw, Draws, drawing_from, prepared
from poptorch.engines.ops import returned_count, written_positions
from poptorch.engines.passes.channels_last import convolution_weights
from poptorch.engines.passes.draw_ahead import DRAWS
from poptorch.engines.passes.native import CAREFUL, NATIVE
from poptorch.engines.passes.prepare import PREPARE
from poptorch.engines.private import aoti
from poptorch.engines.toolchain import CannotBuild, Problem, broken
from poptorch.errors import EngineError, explain
from poptorch.executable import Program
from poptorch.interrupts import run_uninterrupted
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
        return NativeKernel.of(program, run_host_passes(program.graph, host, NATIVE, observe), host)
    except Exception as error:
        logger.debug("compiling the %s program again with fewer optimisations: %s", program.name, first_line(error))
    graph = run_host_passes(program.graph, host, CAREFUL, observe)
    return NativeKernel.of(program, graph, host, is_careful=True)


@dataclass(frozen=True)
class NativeKernel:
    """Native code for a program: for its graph or, if that calls others, for what they share and for each of them."""

    state: HostState
    strides: Strides
    draws: Mapping[str, Draw]
    cut: Cut
    shared: NativeCode | None
    called: Mapping[str, NativeCode]
    returned: int
    written: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, graph: StepGraph, host: Host, *, is_careful: bool = False) -> NativeKernel:
        cut = cut_at_calls(graph)
        images = any(spec.owner in host.channels_last for spec in program.state)
        called: dict[str, NativeCode] = {}
        for name, inner in graph.graphs.items():
            if name not in (DRAWS, PREPARE):
                called[name] = generate(inner, is_careful=is_careful)
        if called:
            logger.debug("%s: %d pieces of %d patterns", program.name, len(cut.calls), len(called))
        return cls(
            HostState.of(program, graph),
            changed_strides(program, graph),
            _draws(graph),
            cut,
            None if cut.shared is None else generate(cut.shared, has_images=images, is_careful=is_careful),
            called,
            returned_count(graph),
            written_positions(graph),
        )

    def bind(self, state: list[torch.Tensor], generators: Sequence[torch.Generator]) -> NativeRun | ReturningRun:
        draws = Draws(list(self.draws.values()), generators) if self.draws else None
        drawn = {} if draws is None else dict(zip(self.draws, draws.memory, strict=True))
        arranged = self.state.arrange(state, drawn)
        if self.shared is not None and not self.shared.writes_in_place:
            return ReturningRun(self, self.shared, arranged, draws, generators[0])
        scratch = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype) for spec in self.cut.scratch]
        codes = [] if self.shared is None else [self.shared]
        arguments = [] if self.shared is None else [[arranged[i] for i in self.cut.shared_state] + scratch]
        for call in self.cut.calls:
            codes.append(self.called[call.graph])
            arguments.append([source.find(arranged, scratch) for source in call.operands])
        return NativeRun(codes, arguments, draws)


def _draws(graph: StepGraph) -> dict[str, Draw]:
    """What fills each input that takes random numbers, in the order in which they are drawn."""
    drawing = graph.graphs.get(DRAWS)
    found = {} if drawing is None else {spec.name: prepared(node) for spec, node in drawing.outputs}
    return {name: draw for name, draw in found.items() if draw is not None}


class NativeRun:
    """Codes that run one after the other on tensors of their own; the first also takes and returns the user's."""

    writes_early = True

    def __init__(
        self, codes: Sequence[NativeCode], arguments: Sequence[list[torch.Tensor]], draws: Draws | None
    ) -> None:
        self._first, self._others = arguments[0], arguments[1:]
        self._draws = draws
        self._codes = codes
        self._natives: list[Any] = [code.native for code in codes]

    def __call__(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._draws is not None:
            self._draws.next()
        arguments = self._first + tensors
        if self._others or None in self._natives:
            return self._start(arguments).write()[0]
        return _to_tensors(self._natives[0](_to_handles(arguments)))

    def start(self, tensors: list[torch.Tensor]) -> Started:
        if self._draws is not None:
            self._draws.next()
        return self._start(self._first + tensors)

    def _start(self, arguments: list[torch.Tensor]) -> Started:
        everything = [arguments, *self._others]
        if None in self._natives:
            return Started(partial(_run_uninterrupted, self._codes, everything), None)
        results = map(_to_tensors, map(_CALL, self._natives, map(_to_handles, everything)))
        return Started(partial(list, results), None)


class ReturningRun:
    """Code that calls Python on the way, and might end there: it returns its new values, and writes nothing itself."""

    writes_early = False

    def __init__(
        self,
        kernel: NativeKernel,
        code: NativeCode,
        state: list[torch.Tensor],
        draws: Draws | None,
        generator: torch.Generator,
    ) -> None:
        self._kernel, self._code, self._state = kernel, code, state
        self._draws, self._generator = draws, generator

    def __call__(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        started = self.start(tensors)
        started.write()
        return started.outputs or ()

    def start(self, tensors: list[torch.Tensor]) -> Started:
        if self._draws is not None:
            self._draws.next()
        returned, arguments = self._kernel.returned, self._state + tensors
        with drawing_from(self._generator):
            results = self._code.function(list(arguments))
        return Started(copying(arguments, self._kernel.written, results, returned), results[:returned])


_CALL = type(len).__call__
_to_handles = aoti.unsafe_alloc_void_ptrs_from_tensors
_to_tensors = aoti.alloc_tensors_by_stealing_from_void_ptrs


def _run_uninterrupted(codes: Sequence[NativeCode], arguments: Sequence[list[torch.Tensor]]) -> list[Any]:
    """Run codes through Inductor's Python wrappers; an interrupt waits until all are done."""
    return run_uninterrupted(lambda: [code.function(own) for code, own in zip(codes, arguments, strict=True)])


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
