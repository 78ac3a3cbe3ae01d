"""Native code on tensors: how a program whose code was generated, or loaded, is bound and run.

Nothing here needs the code generator, which takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from poptorch.engines.calls import Cut
from poptorch.engines.code import NativeCode, to_handles, to_tensors
from poptorch.engines.eager import copying
from poptorch.engines.engine import Started
from poptorch.engines.host_state import HostState, Strides
from poptorch.engines.native_draws import Draw, Draws, drawing_from, prepared
from poptorch.interrupts import run_uninterrupted
from poptorch.ir import StepGraph


@dataclass(frozen=True)
class NativeKernel:
    """Native code for a program: for its graph or, if that calls others, for what they share and for each of them."""

    state: HostState
    strides: Strides
    drawing: StepGraph | None  # what random numbers it takes
    cut: Cut
    shared: NativeCode | None
    called: Mapping[str, NativeCode]
    returned: int
    written: tuple[int, ...]

    def bind(self, state: list[torch.Tensor], generators: Sequence[torch.Generator]) -> NativeRun | ReturningRun:
        wanted = _draws(self.drawing)
        draws = Draws(list(wanted.values()), generators) if wanted else None
        drawn = {} if draws is None else dict(zip(wanted, draws.memory, strict=True))
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


def _draws(drawing: StepGraph | None) -> dict[str, Draw]:
    """What fills each input that takes random numbers, in the order in which they are drawn."""
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
        return to_tensors(self._natives[0](to_handles(arguments)))

    def start(self, tensors: list[torch.Tensor]) -> Started:
        if self._draws is not None:
            self._draws.next()
        return self._start(self._first + tensors)

    def _start(self, arguments: list[torch.Tensor]) -> Started:
        everything = [arguments, *self._others]
        if None in self._natives:
            return Started(partial(_run_uninterrupted, self._codes, everything), None)
        results = map(to_tensors, map(_CALL, self._natives, map(to_handles, everything)))
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


def _run_uninterrupted(codes: Sequence[NativeCode], arguments: Sequence[list[torch.Tensor]]) -> list[Any]:
    """Run codes through Inductor's Python wrappers; an interrupt waits until all are done."""
    return run_uninterrupted(lambda: [code.function(own) for code, own in zip(codes, arguments, strict=True)])
