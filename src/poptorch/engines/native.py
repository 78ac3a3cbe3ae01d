"""Native code on tensors: how a program whose code was generated, or loaded, is bound and run.

Nothing here needs the code generator, which takes seconds to import.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from operator import add, itemgetter
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
    """Native code for a program: for its graph or, if that calls others, for each part that it is cut into."""

    state: HostState
    strides: Strides
    drawing: StepGraph | None  # what random numbers it takes
    cut: Cut
    codes: Mapping[str, NativeCode]  # by the names of the graphs
    returned: int
    written: tuple[int, ...]

    def bind(self, state: list[torch.Tensor], generators: Sequence[torch.Generator]) -> NativeRun | ReturningRun:
        wanted = _draws(self.drawing)
        draws = Draws(list(wanted.values()), generators) if wanted else None
        drawn = {} if draws is None else dict(zip(wanted, draws.memory, strict=True))
        arranged = self.state.arrange(state, drawn)
        codes = [self.codes[part.graph] for part in self.cut.parts]
        if self.cut.is_whole and not codes[0].writes_in_place:
            return ReturningRun(self, codes[0], arranged, draws, generators[0])
        return NativeRun(self.cut, codes, arranged, draws)


def _draws(drawing: StepGraph | None) -> dict[str, Draw]:
    """What fills each input that takes random numbers, in the order in which they are drawn."""
    found = {} if drawing is None else {spec.name: prepared(node) for spec, node in drawing.outputs}
    return {name: draw for name, draw in found.items() if draw is not None}


class NativeRun:
    """Codes that run one after the other on the tensors of a table; Python does nothing in between."""

    writes_early = True

    def __init__(self, cut: Cut, codes: Sequence[NativeCode], state: list[torch.Tensor], draws: Draws | None) -> None:
        state = state + [torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype) for kept in cut.kept]
        self._fixed = state + [view.find(state) for view in cut.views]
        self._draws = draws
        self._steps = list(zip(codes, cut.parts, strict=True))
        self._natives: list[Any] = [code.native for code in codes]
        self._only = self._natives[0] if cut.is_whole else None
        self._empty = [None] * sum(part.results for part in cut.parts)
        self._takers = [_taker(part.operands) for part in cut.parts]
        self._return = _taker(cut.returned)
        self._blanks = [(None,) * len(part.dropped) for part in cut.parts]
        self._places = [
            place for part in cut.parts for place in (slice(part.first, part.first + part.results), *part.dropped)
        ]

    def __call__(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._draws is not None:
            self._draws.next()
        if self._only is not None:
            return to_tensors(self._only(to_handles(self._fixed + tensors)))
        return self._start(tensors).write()[-1]

    def start(self, tensors: list[torch.Tensor]) -> Started:
        if self._draws is not None:
            self._draws.next()
        return self._start(tensors)

    def _start(self, tensors: list[torch.Tensor]) -> Started:
        """The call that does everything.

        Each part is fed from the table and its results go into it, then what nobody needs any more is taken out. This
        happens in iterators that are written in C, one value at a time, so there is no moment for a signal.
        """
        table: list[Any] = self._fixed + tensors + self._empty
        if None in self._natives:
            return Started(partial(run_uninterrupted, partial(self._run_wrappers, table)), None)
        arguments = map(to_handles, map(_TAKE, self._takers, repeat(table)))
        results = map(to_tensors, map(_CALL, self._natives, arguments))
        entries = chain.from_iterable(map(_JOIN, zip(results), self._blanks))
        put: Callable[[Any, Any], None] = table.__setitem__
        everything = partial(deque, map(put, self._places, entries), 0)
        return Started(partial(list, map(partial.__call__, (everything, partial(self._return, table)))), None)

    def _run_wrappers(self, table: list[Any]) -> list[Any]:
        """The same through Inductor's Python wrappers; an interrupt has to wait until all are done."""
        for (code, part), take in zip(self._steps, self._takers, strict=True):
            table[part.first : part.first + part.results] = code.function(list(take(table)))
            for place in part.dropped:
                table[place] = None
        return [self._return(table)]


def _taker(places: Sequence[int]) -> itemgetter[Any]:
    """What takes a sequence of items out of a table."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0, 0))


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
_TAKE = itemgetter.__call__
_JOIN: Callable[[tuple[Any, ...], tuple[None, ...]], tuple[Any, ...]] = add
