"""Run an executable: cut a call into micro-batches, follow the schedule on bound state, collect the outputs.

State that belongs to the user is bound from outside and changed in place. Whatever ends a call early, state is that of
the last commit, and the next call is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from poptorch.engines import NOTHING_TO_WRITE, Bound, Kernel, Started, finish
from poptorch.errors import EngineError, GuardError, explain
from poptorch.executable import Commit, Executable, Program, Run, out_of_range
from poptorch.runtime.binding import bind
from poptorch.runtime.checking import CallChecks
from poptorch.runtime.collect import Collector
from poptorch.runtime.random import RandomStreams
from poptorch.runtime.relay import Relay
from poptorch.runtime.surroundings import Surroundings
from poptorch.runtime.threads import run_threads
from poptorch.runtime.trace import RunTrace

_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default
_RECURRENT_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default

MicroBatch = list[torch.Tensor]
Action = tuple[int | None, Callable[..., Any]]  # the micro-batch of a run, or None for a commit


class CallResult(NamedTuple):
    """What one call gives: the user's outputs, the anchored tensors by name, and what ran when."""

    outputs: list[torch.Tensor]
    anchored: dict[str, torch.Tensor]
    trace: RunTrace


@dataclass(frozen=True)
class _Record:
    """What the parts of a call have done so far: outputs of micro-batches that are through, and when each part ran."""

    finished: dict[int, Sequence[torch.Tensor]]
    moments: dict[int, tuple[float, float]]

    def time(self, number: int, execute: Callable[[], Any]) -> Any:
        begin = perf_counter()
        result = execute()
        self.moments[number] = (begin, perf_counter())
        return result


class _Journal:
    """Whether something was begun that is not final yet.

    Entries are made by `finish`, in the same uninterrupted call as the writes that they tell of.
    """

    def __init__(self) -> None:
        self._entries: list[bool] = []
        self.begun = partial(self._entries.append, True)
        self.ended = partial(self._entries.append, False)

    @property
    def is_open(self) -> bool:
        return bool(self._entries) and self._entries[-1]

    def clear(self) -> None:
        self._entries.clear()


class Session:
    """An executable with kernels and state, ready to be called."""

    def __init__(
        self, executable: Executable, kernels: Mapping[str, Kernel], state: Mapping[str, torch.Tensor]
    ) -> None:
        self.executable = executable
        self.kernels = kernels
        self._schedule = executable.schedule
        self._collector = Collector(executable)
        self._checks = CallChecks(executable)
        self._is_guarded = bool(executable.guards)
        limits = [guard.limits for guard in executable.guards]
        self._limits = torch.tensor(limits, dtype=torch.int64).reshape(-1, 2).T
        self._grad_mode = _grad_mode(executable.programs)
        self._surroundings = Surroundings()
        self._draws = any(executable.program(run.program).draws_random_numbers for run in self._schedule.runs)
        self.random = RandomStreams(executable.random_seed, executable.batching.replicas)
        self._random_before: list[torch.Tensor] = []  # what was begun
        self._journal = _Journal()
        self._is_torn = False  # whether native code failed in the middle of an update
        self._relay = Relay(executable) if executable.is_cut else None
        self.bind(state)

    def bind(self, state: Mapping[str, torch.Tensor]) -> None:
        """Work on these tensors from now on."""
        if self._surroundings.differ:
            with self._surroundings.restored():
                return self.bind(state)
        self._bound = bind(self.executable, self.kernels, state, self.random)
        self._actions = [self._action(instruction, bound) for instruction, bound in self._bound.actions]
        self._journal.clear()
        self._is_torn = False
        self._checks.bind(self._bound.replicas[0])

    def _action(self, instruction: Any, bound: list[Bound]) -> Action:
        if isinstance(instruction, Commit):
            return None, partial(self._commit, bound)
        if self._relay is not None:
            return instruction.micro_batch, partial(self._relay.run, instruction.program, bound[0])
        return instruction.micro_batch, partial(self._run_final, bound[0]) if instruction.commits else bound[0]

    def run(self, tensors: list[torch.Tensor]) -> CallResult:
        """Run every micro-batch of a call and give the collected outputs."""
        if self._surroundings.differ:
            with self._surroundings.restored():
                return self.run(tensors)
        inputs = self._inputs(tensors)
        self._checks.make(tensors, partial(self._micro_batches, tensors))
        if self._is_torn:
            raise EngineError(_TORN)
        if self._journal.is_open:  # an earlier call was interrupted while it took back what it had begun
            self._undo()
        self.random.were_used |= self._draws
        try:
            return self._follow(inputs) if self._relay is None else self._follow_parts(inputs)
        except BaseException:
            if self._journal.is_open:
                self._undo()
            raise

    def _follow(self, inputs: Sequence[MicroBatch]) -> CallResult:
        """Follow the schedule from its first instruction to its last, on the tensors for each run."""
        if self._grad_mode not in (None, torch.is_grad_enabled()):
            with torch.set_grad_enabled(bool(self._grad_mode)):
                return self._follow(inputs)
        schedule, collector, bound = self._schedule, self._collector, self._bound
        outputs: list[Sequence[torch.Tensor]] = []
        anchored, pending = collector.begin(), list[int]()  # micro-batches that are not final yet
        begins, ends = list[float](), list[float]()
        begun = perf_counter()
        for first in range(0, schedule.rounds * schedule.micro_batches, schedule.micro_batches):
            if schedule.is_revocable:
                self._begin()
            for place, execute in self._actions:
                begins.append(perf_counter())
                if place is None:
                    execute()
                    ends.append(perf_counter())
                else:
                    index = first + place
                    result = execute(inputs[index // schedule.width])
                    ends.append(perf_counter())
                    if self._is_guarded:
                        self._check_guards(result[-1], index)
                    collector.keep(outputs, result, index)
                    if collector.has_anchors:
                        collector.take(anchored, result, index)
                        pending.extend(range(index, index + schedule.width))
                if collector.has_anchors and (place is None or not schedule.is_revocable):
                    collector.take_state(anchored, bound.replicas, pending)
                    pending.clear()
        self._journal.clear()
        collected, found = collector.join(outputs), collector.join_anchors(anchored)
        trace = RunTrace(schedule, begun, tuple(begins), tuple(ends), perf_counter())
        return CallResult(collected, found, trace)

    def _follow_parts(self, micro_batches: Sequence[MicroBatch]) -> CallResult:
        """Follow the schedule of a step that is cut into parts: every IPU on a thread of its own, then the commit."""
        schedule, collector = self._schedule, self._collector
        assert self._relay is not None
        self._relay.begin()
        record = _Record({}, {})
        anchored, begun = collector.begin(), perf_counter()
        for turn in range(schedule.rounds):
            first = turn * schedule.micro_batches
            if schedule.is_revocable:
                self._begin()
            run_threads(self._works(turn, micro_batches, record), self._relay.give_up)
            if schedule.is_revocable:
                record.time((turn + 1) * len(self._actions) - 1, self._actions[-1][1])
            if collector.has_anchors:
                indices = range(first, first + schedule.micro_batches)
                collector.take_state(anchored, self._bound.replicas, indices)
        self._journal.clear()
        for index, result in sorted(record.finished.items()):
            collector.take(anchored, result, index)
        outputs = [result for index, result in sorted(record.finished.items()) if index in collector.kept]
        collected, found = collector.join(outputs), collector.join_anchors(anchored)
        begins, ends = zip(*(record.moments[number] for number in sorted(record.moments)), strict=True)
        return CallResult(collected, found, RunTrace(schedule, begun, begins, ends, perf_counter()))

    def _works(
        self, turn: int, micro_batches: Sequence[MicroBatch], record: _Record
    ) -> dict[int, list[Callable[[], None]]]:
        """What each IPU has to do in a round. Replicas share gradient accumulators, so their IPUs take turns."""
        schedule = self._schedule
        ipus = 1 + max(run.ipu for run in schedule.runs if run.replica == 0)
        works: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        for position, (place, execute) in enumerate(self._actions):
            instruction = schedule.instructions[position]
            if isinstance(instruction, Run) and place is not None:
                index = turn * schedule.micro_batches + place
                part = partial(execute, index, micro_batches[index])
                number = turn * len(self._actions) + position
                works[instruction.ipu % ipus].append(partial(self._run_part, part, index, number, record))
        return works

    def _run_part(
        self, part: Callable[[], Sequence[torch.Tensor] | None], index: int, number: int, record: _Record
    ) -> None:
        """Run one part; when a micro-batch is through, see whether its guards hold."""
        is_free = self._grad_mode is None
        with nullcontext() if is_free else torch.set_grad_enabled(bool(self._grad_mode)):
            result = record.time(number, part)
        if result is not None:
            if self._is_guarded:
                self._check_guards(result[-1], index)
            record.finished[index] = result

    def _begin(self) -> None:
        """Remember what to go back to if what follows does not become final."""
        if self._draws:
            self._random_before = self.random.save()
        bound = self._bound
        save = partial(torch._foreach_copy_, bound.saved, bound.volatile) if bound.volatile else NOTHING_TO_WRITE
        finish([Started(save, ())], self._journal.begun)

    def _undo(self) -> None:
        """Take back what was written but will not become final."""
        if self._draws:
            self.random.restore(self._random_before)
        writes: list[partial[Any]] = []
        if self._bound.accumulators:
            writes.append(partial(torch._foreach_zero_, self._bound.accumulators))
        if self._bound.volatile:
            writes.append(partial(torch._foreach_copy_, self._bound.volatile, self._bound.saved))
        finish([Started(NOTHING_TO_WRITE, ())], *writes, self._journal.ended)

    def _commit(self, updates: Sequence[Bound]) -> Sequence[torch.Tensor]:
        """Run the updates, and make final what was begun."""
        return self._write([update.start([]) for update in updates] or [Started(NOTHING_TO_WRITE, ())])

    def _run_final(self, step: Bound, micro_batch: MicroBatch) -> Sequence[torch.Tensor]:
        """Run a step that does everything; if it draws, the mark in the journal tells whether it is done."""
        if self._draws:
            self._begin()
            return self._write([step.start(micro_batch)])
        try:
            return step(micro_batch)
        except Exception as error:
            if step.writes_early and self.executable.changes_state:
                raise self._torn(error) from error
            raise

    def _write(self, started: Sequence[Started]) -> Sequence[torch.Tensor]:
        """Let programs write that change weights, and end what was begun."""
        try:
            return finish(started, self._journal.ended)
        except Exception as error:
            if self.executable.changes_state:
                raise self._torn(error) from error
            raise

    def _torn(self, error: Exception) -> EngineError:
        """What to raise if a program fails while it changes weights; there is no way back from that."""
        self._is_torn = True
        return EngineError(f"{_TORN}\n  reason: {error}")

    def _inputs(self, tensors: list[torch.Tensor]) -> list[MicroBatch]:
        """What each run is fed: a micro-batch, or the rows of several one below the other."""
        width, batching = self._schedule.width, self.executable.batching
        if width == 1:
            return self._micro_batches(tensors)
        if batching.input_batches == batching.micro_batches:
            rounds = batching.micro_batches // width
            parts = [tensor.split(tensor.shape[0] // rounds) for tensor in tensors]
            return [list(part) for part in zip(*parts, strict=True)] if parts else [[] for _ in range(rounds)]
        single = self._micro_batches(tensors)
        groups = [single[first : first + width] for first in range(0, len(single), width)]
        return [[torch.cat(rows) for rows in zip(*group, strict=True)] for group in groups]

    def _micro_batches(self, tensors: list[torch.Tensor]) -> list[MicroBatch]:
        count, sources = self.executable.batching.input_batches, self.executable.batching.sources
        if len(sources) == 1:
            return [tensors]
        if not tensors:
            return [[] for _ in sources]
        parts = [tensor.split(tensor.shape[0] // count) if tensor.dim() else (tensor,) for tensor in tensors]
        batches = [list(batch) for batch in zip(*parts, strict=True)]
        return batches if count == len(sources) else [list(batches[source]) for source in sources]

    def _check_guards(self, found: torch.Tensor, micro_batch: int) -> None:
        found = found.view(-1, len(self.executable.guards))  # a row for each micro-batch
        holds = found if found.dtype is torch.bool else (found >= self._limits[0]) & (found <= self._limits[1])
        if bool(holds.all()):
            return
        row, position = (int(place) for place in (~holds).nonzero()[0])
        found, micro_batch = found[row], micro_batch + row
        guard = self.executable.guards[position]
        if guard.allowed is not None:
            raise out_of_range(
                f"micro-batch {micro_batch} of this call computes the {guard.allowed.what} {int(found[position])}",
                guard.allowed,
                guard.line,
                state="the model and the optimiser are as they were after the last finished update",
                fix="keep it in range, for example with clamp",
            )
        raise GuardError(
            explain(
                f"micro-batch {micro_batch} of this call contradicts {guard.expected}, "
                "which the first batch froze into the compiled program.",
                where=str(guard.line),
                state="the model and the optimiser are as they were after the last finished update",
                fix="make forward independent of the data (torch.where, masks), or call destroy() to compile again",
            )
        )


_TORN = (
    "a program failed in the middle of a weight update: the weights may hold a part of it.\n"
    "  fix:    load a checkpoint (load_state_dict on the model and the optimiser), then call copyWeightsToDevice()"
)


def _grad_mode(programs: Sequence[Program]) -> bool | None:
    """The mode that kernels must run in; None if they do not look at it.

    oneDNN's recurrent layers do: they keep what their backward pass needs in grad mode, and are faster outside.
    """
    ops = {node.target for program in programs for node in program.graph.ops.nodes}
    return _RECURRENT_BACKWARD in ops if _RECURRENT in ops else None
