"""Run an executable: cut a call into micro-batches, follow the schedule on bound state, collect the outputs.

State that belongs to the user is bound from outside and changed in place. Whatever ends a call early, state is that of
the last commit, and the next call is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from poptorch.engines import NOTHING_TO_WRITE, Bound, Kernel, Started, finish
from poptorch.errors import EngineError, GuardError, explain
from poptorch.executable import Commit, Executable, Program, out_of_range
from poptorch.runtime.binding import bind
from poptorch.runtime.checking import CallChecks
from poptorch.runtime.collect import Collector
from poptorch.runtime.random import RandomStreams
from poptorch.runtime.trace import RunTrace

_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default
_RECURRENT_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default

MicroBatch = list[torch.Tensor]
Action = tuple[int | None, Callable[..., Sequence[torch.Tensor]]]  # the micro-batch of a run, or None for a commit


class CallResult(NamedTuple):
    """What one call gives: the user's outputs, the anchored tensors by name, and what ran when."""

    outputs: list[torch.Tensor]
    anchored: dict[str, torch.Tensor]
    trace: RunTrace


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
        self._kernels = kernels
        self._schedule = executable.schedule
        self._collector = Collector(executable)
        self._checks = CallChecks(executable)
        self._is_guarded = bool(executable.guards)
        limits = [guard.limits for guard in executable.guards]
        self._limits = torch.tensor(limits, dtype=torch.int64).reshape(-1, 2).T
        self._grad_mode = _grad_mode(executable.programs)
        self._draws = any(executable.program(run.program).draws_random_numbers for run in self._schedule.runs)
        self.random = RandomStreams(executable.random_seed, executable.batching.replicas)
        self._random_before: list[torch.Tensor] = []  # what was begun
        self._journal = _Journal()
        self._is_torn = False  # whether native code failed in the middle of an update
        self.bind(state)

    def bind(self, state: Mapping[str, torch.Tensor]) -> None:
        """Work on these tensors from now on."""
        self._bound = bind(self.executable, self._kernels, state, self.random)
        self._actions = [self._action(instruction, bound) for instruction, bound in self._bound.actions]
        self._journal.clear()
        self._is_torn = False
        self._checks.bind(self._bound.replicas[0])

    def _action(self, instruction: Any, bound: list[Bound]) -> Action:
        if isinstance(instruction, Commit):
            return None, partial(self._commit, bound)
        return instruction.micro_batch, partial(self._run_final, bound[0]) if instruction.commits else bound[0]

    def run(self, tensors: list[torch.Tensor]) -> CallResult:
        """Run every micro-batch of a call and give the collected outputs."""
        inputs = self._inputs(tensors)
        self._checks.make(tensors, partial(self._micro_batches, tensors))
        if self._is_torn:
            raise EngineError(_TORN)
        if self._journal.is_open:  # an earlier call was interrupted while it took back what it had begun
            self._undo()
        self.random.were_used |= self._draws
        try:
            return self._follow(inputs)
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
