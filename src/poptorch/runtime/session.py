"""Run an executable: cut a call into micro-batches, follow the schedule on bound state, collect the outputs.

State that belongs to the user is bound from outside and changed in place. Whatever ends a call early, state is that of
the last commit, and the next call is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from poptorch.engines import NOTHING_TO_WRITE, Bound, Kernel, Started, finish
from poptorch.errors import EngineError, GuardError, ProcessError, explain
from poptorch.executable import (
    Commit,
    Exchange,
    Executable,
    Gather,
    Instruction,
    Meet,
    Program,
    Reduce,
    out_of_range,
)
from poptorch.interrupts import run_uninterrupted
from poptorch.processes import Team
from poptorch.runtime.binding import bind
from poptorch.runtime.checking import CallChecks
from poptorch.runtime.collect import Anchored, Collector, Outputs
from poptorch.runtime.courier import Courier
from poptorch.runtime.random import RandomStreams
from poptorch.runtime.reduction import Reduction
from poptorch.runtime.relay import Relay
from poptorch.runtime.surroundings import Surroundings
from poptorch.runtime.threads import run_threads
from poptorch.runtime.trace import RunTrace

_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default
_RECURRENT_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default

MicroBatch = list[torch.Tensor]
Lane = list[tuple[int, int | None, Callable[..., Any]]]  # place in the round, micro-batch if it is a run, what to do


class Seat(NamedTuple):
    """Which process of a program a session runs in, and its connections to others if it needs any."""

    index: int = 0
    companions: Team | None = None  # which have the same programs, and add up gradients with this one
    stages: Team | None = None  # which have the other stages of the same replicas

    @property
    def is_connected(self) -> bool:
        return self.companions is not None or self.stages is not None


ALONE = Seat()


class CallResult(NamedTuple):
    """What one call gives: the user's outputs, the anchored tensors by name, and what ran when."""

    outputs: list[torch.Tensor]
    anchored: dict[str, torch.Tensor]
    trace: RunTrace


class _Record:
    """What a call has done so far; IPUs on different threads fill it, each entry once."""

    __slots__ = ("anchored", "begins", "ends", "outputs", "pending")

    def __init__(self, anchored: Anchored, instructions: int) -> None:
        self.outputs: Outputs = {}
        self.anchored = anchored
        self.pending: list[int] = []  # micro-batches that are not final yet
        self.begins = [0.0] * instructions
        self.ends = [0.0] * instructions


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
        self,
        executable: Executable,
        kernels: Mapping[str, Kernel],
        state: Mapping[str, torch.Tensor],
        seat: Seat = ALONE,
    ) -> None:
        self.executable = executable
        self._seat = seat
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
        self.random = RandomStreams(executable.random_seed, executable.batching.replicas, seat.index)
        self._random_before: list[torch.Tensor] = []  # what was begun
        self._journal = _Journal()
        self._is_torn = False  # whether native code failed in the middle of an update
        self._courier = self._find_courier()
        self._met: dict[str, torch.Tensor] = {}  # what processes have told each other for the update
        self._relay = Relay(executable, self._courier) if executable.is_cut else None
        self.bind(state)

    def _find_courier(self) -> Courier | None:
        """Who brings values from and to the processes that have other stages, if there are any."""
        share = self.executable.share
        if share is None:
            return None
        if self._seat.stages is None:
            raise EngineError(_ALONE)
        return Courier(self.executable, share, self._seat.stages, self._wanted())

    def _wanted(self) -> frozenset[int]:
        """The micro-batches of a call of which something is returned or checked."""
        every = range(self.executable.batching.micro_batches)
        anchored = (index for anchor in self.executable.anchors for index in anchor.kept)
        return frozenset(every) if self._is_guarded else self._collector.kept.union(anchored)

    def bind(self, state: Mapping[str, torch.Tensor]) -> None:
        """Work on these tensors from now on."""
        if self._surroundings.differ:
            with self._surroundings.restored():
                return self.bind(state)
        self._bound = bind(self.executable, self.kernels, state, self.random)
        self._groups = self._lanes()
        self._journal.clear()
        self._is_torn = False
        self._checks.bind(self._bound.replicas[0])

    def exchange(self, kernels: Mapping[str, Kernel], state: Mapping[str, torch.Tensor]) -> None:
        """Go on with other kernels for the same programs, on the same state in the layouts that they want.

        Only while it `is_settled`. Random numbers, and the buffers that replicas have of their own, go on as well.
        """
        before, self.kernels = self._bound, kernels
        self.bind(state)
        self._bound.take_copies(before)

    @property
    def is_settled(self) -> bool:
        """Whether the state is that after the last call, with nothing to take back and nothing to put right."""
        return not self._is_torn and not self._journal.is_open

    @property
    def replica_buffers(self) -> list[dict[str, torch.Tensor]]:
        """The buffers that steps change, which every replica has for itself; the module has those of the first."""
        return [{name: replica[name].detach() for name in self._bound.copied} for replica in self._bound.replicas]

    def _lanes(self) -> list[list[Lane]]:
        """Who follows which instructions of a round: groups of lanes, one group after the other.

        The lanes of a group run at the same time. A step that is cut has a lane for each IPU, then one for the rest;
        replicas share gradient accumulators, so their IPUs share lanes. Any other step has one lane, and so has a
        process that has some of the stages: it waits for others only for what comes next in the common schedule.
        """
        numbered = [(i, *self._action(each, bound)) for i, (each, bound) in enumerate(self._bound.actions)]
        if self._relay is None:
            return [[numbered]]
        runs = self._schedule.runs
        ipus = 1 + max((run.ipu for run in runs if run.replica == 0), default=0)
        shared: defaultdict[int, Lane] = defaultdict(list)
        for run, action in zip(runs, numbered, strict=False):  # runs come first
            shared[run.ipu % ipus if self._courier is None else 0].append(action)
        others = numbered[len(runs) :]
        return [list(shared.values()), *([[others]] if others else [])]

    def _action(self, instruction: Instruction, bound: list[Bound]) -> tuple[int | None, Callable[..., Any]]:
        if isinstance(instruction, Commit):
            copies = len(bound) // max(1, len(instruction.updates))  # of each update
            taken = [self._taken(name) for name in instruction.updates for _ in range(copies)]
            return None, partial(self._commit, list(zip(bound, taken, strict=True)))
        if isinstance(instruction, Reduce):
            return None, self._reduce
        if isinstance(instruction, Exchange):
            return None, partial(self._exchange, bound[0], self._taken(instruction.program), instruction.result)
        if isinstance(instruction, Gather):
            return None, partial(run_uninterrupted, self._gather)
        if isinstance(instruction, Meet):
            return None, partial(self._meet, bound)
        if self._relay is not None:
            return instruction.micro_batch, partial(self._relay.run, instruction.program, bound[0])
        if self._bound.reduction is not None and self._bound.reduction.is_in_order:
            return instruction.micro_batch, partial(self._run_apart, self._bound.reduction, bound[0])
        return instruction.micro_batch, partial(self._run_final, bound[0]) if instruction.commits else bound[0]

    def run(self, tensors: list[torch.Tensor]) -> CallResult:
        """Run every micro-batch of a call and give the collected outputs."""
        if self._surroundings.differ:
            with self._surroundings.restored():
                return self.run(tensors)
        inputs = self._inputs(tensors)
        self._checks.make(tensors, self._micro_batches)
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
        schedule, collector = self._schedule, self._collector
        record = _Record(collector.begin(), schedule.rounds * len(schedule.instructions))
        if self._relay is not None:
            self._relay.begin()
        begun = perf_counter()
        for turn in range(schedule.rounds):
            if schedule.is_revocable:
                self._begin()
            for number, lanes in enumerate(self._groups):
                if number and self._courier is not None:
                    self._take_outputs(turn, record)
                if len(lanes) == 1:
                    self._follow_lane(lanes[0], turn, inputs, record)
                else:
                    self._follow_lanes(lanes, turn, inputs, record)
        self._journal.clear()
        if self._courier is not None:
            self._spread_random_numbers(self._courier)
        collected, found = collector.join(record.outputs), collector.join_anchors(record.anchored)
        trace = RunTrace(schedule, begun, tuple(record.begins), tuple(record.ends), perf_counter())
        return CallResult(collected, found, trace)

    def _follow_lanes(self, lanes: Sequence[Lane], turn: int, inputs: Sequence[MicroBatch], record: _Record) -> None:
        """Follow the lanes of one group, at the same time."""
        assert self._relay is not None, "only the parts of a step have lanes of their own"
        run_threads([partial(self._follow_lane, lane, turn, inputs, record) for lane in lanes], self._relay.give_up)

    def _follow_lane(self, lane: Lane, turn: int, inputs: Sequence[MicroBatch], record: _Record) -> None:
        """Follow some instructions of one round in their order."""
        if self._grad_mode is not None and self._grad_mode is not torch.is_grad_enabled():
            with torch.set_grad_enabled(self._grad_mode):
                return self._follow_lane(lane, turn, inputs, record)
        schedule, collector, is_cut = self._schedule, self._collector, self._relay is not None
        first, number = turn * schedule.micro_batches, turn * len(schedule.instructions)
        for position, place, execute in lane:
            record.begins[number + position] = perf_counter()
            if place is None:
                execute()
                record.ends[number + position] = perf_counter()
            else:
                index = first + place
                given = inputs[index // schedule.width]
                result = execute(index, given) if is_cut else execute(given)
                record.ends[number + position] = perf_counter()
                if result is None:  # parts of this micro-batch are still to come
                    continue
                self._keep(result, index, record)
            if collector.has_anchors and self.is_settled:  # what was computed is final
                collector.take_state(record.anchored, self._bound.replicas, record.pending)
                record.pending.clear()

    def _keep(self, result: Sequence[torch.Tensor], index: int, record: _Record) -> None:
        """Check what a micro-batch has computed, and keep what is returned."""
        collector = self._collector
        if self._is_guarded:
            self._check_guards(result[-1], index)
        collector.keep(record.outputs, result, index)
        if collector.has_anchors:
            collector.take(record.anchored, result, index)
            record.pending.extend(range(index, index + self._schedule.width))

    def _take_outputs(self, turn: int, record: _Record) -> None:
        """Wait for the outputs of a round, wherever they were computed."""
        assert self._relay is not None
        first, count, wanted = turn * self._schedule.micro_batches, self._schedule.micro_batches, self._wanted()
        for index in range(first, first + count):
            if index in wanted:
                self._keep(self._relay.outputs(index), index, record)

    def _spread_random_numbers(self, courier: Courier) -> None:
        """After a call, let all processes of a replica go on with the random numbers of the one that draws them."""
        share = self.executable.share
        if share is None or share.drawer is None:
            return
        states = self.random.save()
        courier.spread(states, share.drawer)
        self.random.restore(states)
        self.random.were_used = True

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
        if self._bound.reduction is not None:
            self._bound.reduction.clear()
        if self._bound.accumulators:
            writes.append(partial(torch._foreach_zero_, self._bound.accumulators))
        if self._bound.volatile:
            writes.append(partial(torch._foreach_copy_, self._bound.volatile, self._bound.saved))
        finish([Started(NOTHING_TO_WRITE, ())], *writes, self._journal.ended)

    def _run_apart(self, reduction: Reduction, step: Bound, micro_batch: MicroBatch) -> Sequence[torch.Tensor]:
        """Run a step whose gradients are kept by themselves, to be added up in order."""
        outputs = step(micro_batch)
        reduction.set_aside()
        return outputs

    def _reduce(self) -> None:
        """Add up gradients with the other processes."""
        reduction = self._bound.reduction
        assert reduction is not None, "a schedule with a reduction is bound to one"
        try:
            reduction.reduce(self._connected(), self.executable.batching.replicas)
        except ProcessError as error:
            if self._courier is not None:  # the other stages of this replica do not know yet
                self._connected().tell(error)
                self._courier.refuse()
                self._courier.tell_failure()
            raise

    def _meet(self, programs: Sequence[Bound]) -> None:
        """Wait until the processes that have other stages are ready too, and learn what the update needs of them."""
        if self._courier is None:
            raise EngineError(_ALONE)
        self._met = self._courier.meet([value for program in programs for value in program([])])

    def _exchange(self, program: Bound, taken: Sequence[str], result: str) -> None:
        """Tell the other processes about the rows of this one, and learn about theirs."""
        (told,) = program([self._met[name] for name in taken])
        self._met[result] = self._connected().gather(told)

    def _gather(self) -> None:
        """Bring the rows together that processes have updated; until then the weights are those of no update."""
        group, tensors = self._connected(), self._bound.replicas[0]
        try:
            for shard in self.executable.binding.shards:
                group.gather_rows(tensors[shard.name], shard.bounds)
        except ProcessError as error:
            raise self._torn(error) from error
        self._is_torn = False

    def _connected(self) -> Team:
        if self._seat.companions is None:
            raise EngineError(_ALONE)
        return self._seat.companions

    def refuse(self) -> None:
        """After an error that the other processes do not know of yet: let the call in which they are fail too."""
        if self._courier is not None:
            self._courier.refuse()
        reduction, companions = self._bound.reduction, self._seat.companions
        if reduction is not None and companions is not None:
            reduction.refuse(companions, self.executable.batching.replicas)
        if self._courier is not None:
            self._courier.tell_failure()

    def _commit(self, updates: Sequence[tuple[Bound, Sequence[str]]]) -> Sequence[torch.Tensor]:
        """Run the updates, each on what it takes of the values that were met, and make final what was begun."""
        started = [update.start([self._met[name] for name in taken]) for update, taken in updates]
        torn = [partial(setattr, self, "_is_torn", True)] if self._schedule.gathering else []
        return self._write(started or [Started(NOTHING_TO_WRITE, ())], *torn)

    def _taken(self, program: str) -> list[str]:
        """The values that a program takes of those that processes have told each other."""
        return [spec.name for spec in self.executable.program(program).signature.passed]

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

    def _write(self, started: Sequence[Started], *marks: partial[Any]) -> Sequence[torch.Tensor]:
        """Let programs write that change weights, and end what was begun."""
        try:
            return finish(started, *marks, self._journal.ended)
        except Exception as error:
            if self.executable.changes_state:
                raise self._torn(error) from error
            raise

    def _torn(self, error: Exception) -> EngineError:
        """What to raise if a program fails while it changes weights; there is no way back from that."""
        self._is_torn = True
        return EngineError(f"{_TORN}\n  reason: {str(error).splitlines()[0]}")

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
        sources = self.executable.batching.sources
        if len(sources) == 1:
            return [tensors]
        count = self.executable.batching.input_batches
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


_ALONE = "this program exchanges values with other processes, but was loaded in a process that has none."
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
