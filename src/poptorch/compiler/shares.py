"""Take the part of one process out of an executable: the stages of its IPUs, and the update of their weights.

In:    an executable whose micro-batches go from stage to stage.
Out:   the programs, instructions and state of one process, with what it hands over to others and gets from them.
Keeps: every value; all parts together do what the executable does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from poptorch.compiler.process_updates import ProcessUpdate, split_by_process
from poptorch.compiler.sections import Sections
from poptorch.errors import CompileError, explain
from poptorch.executable import Commit, Executable, Handover, Home, Instruction, Meet, Program, Schedule, Share
from poptorch.ir import InputSpec, OutputRole, Role, StepGraph, value_of
from poptorch.options import ProcessSettings, Settings


def check_shares(sections: Sections, settings: Settings) -> None:
    """Raise if the stages of a model cannot be spread over the processes that the options ask for."""
    processes = settings.processes
    options = f"Distributed.processesPerReplica({processes.parts})"
    if processes.parts == 1:
        return
    if sections.ipus < processes.parts:
        raise CompileError(
            explain(
                f"the model is on {sections.ipus} IPU(s), which cannot be spread over {processes.parts} processes.",
                options=options,
                fix="put its blocks on more IPUs (poptorch.BeginBlock, Block), or use fewer processes",
            )
        )


def take_share(whole: Executable, sections: Sections, processes: ProcessSettings) -> Executable:
    """The executable of one process."""
    return _Cut(whole, sections, processes).executable()


class _Cut:
    def __init__(self, whole: Executable, sections: Sections, processes: ProcessSettings) -> None:
        self._whole, self._index, self._count = whole, processes.part, processes.parts
        self._ipus = sections.ipus
        self._places = {run.program: self._process_of(run.ipu) for run in whole.schedule.runs}
        self._steps = {program.name: program for program in whole.steps}
        self._check()
        self._updates = self._split_updates()

    def _process_of(self, ipu: int) -> int:
        return ipu % self._ipus * self._count // self._ipus

    def executable(self) -> Executable:
        whole = self._whole
        programs = [program for name, program in self._steps.items() if self._places[name] == self._index]
        programs += [Program(graph) for graph in self._rare(self._index)]
        own = {spec.name for program in programs for spec in program.state}
        state = {spec.name: spec for spec in whole.state if spec.name in own}
        return replace(
            whole,
            programs=tuple(programs),
            schedule=self._schedule(),
            binding=replace(whole.binding, inputs=tuple(state.values())),
            checks=tuple(check for check in whole.checks if own.issuperset(check.state)),
            share=self._share(),
            common=whole.common_digest,
        )

    # ---- who has what

    def _split_updates(self) -> list[ProcessUpdate]:
        update = self._whole.update
        if update is None:
            return [ProcessUpdate(None, None)] * self._count
        return split_by_process(update.graph, self._parameter_homes(), self._count)

    def _rare(self, process: int) -> list[StepGraph]:
        """The programs of a process that do not run for every micro-batch."""
        own = self._updates[process]
        return [graph for graph in (own.told, own.update) if graph is not None]

    def _users(self, spec: InputSpec) -> set[int]:
        """The processes whose stages use a state."""
        return {self._places[n] for n, p in self._steps.items() if any(own.name == spec.name for own in p.state)}

    def _parameter_homes(self) -> dict[str, int]:
        """The process of each trained parameter: the one that adds up its gradients."""
        sums = [spec for spec in self._whole.state if spec.role is Role.ACCUMULATOR and spec.owner]
        return {spec.owner: min(users) for spec in sums if (users := self._users(spec))}

    def _check(self) -> None:
        update = self._whole.update
        written = {name for program in self._whole.programs for name in program.written_state}
        for spec in self._whole.state:
            together = {p for other in self._whole.state if other.owner == spec.name for p in self._users(other)}
            if spec.role in (Role.PARAMETER, Role.BUFFER) and spec.name in written and len(together) > 1:
                raise CompileError(_used_twice(spec, sorted(together)))
        drawing = [name for name, program in self._steps.items() if program.draws_random_numbers]
        if len(drawing) > 1 or (update is not None and update.draws_random_numbers):
            raise CompileError(
                explain(
                    "random numbers that depend on the results of several stages cannot be drawn in the order of one "
                    "process.",
                    programs=", ".join(drawing),
                    fix="draw what needs only a size, such as torch.rand_like, or use one process for each replica",
                )
            )
        if self._whole.binding.groupings or any(anchor.state is not None for anchor in self._whole.anchors):
            raise CompileError(
                explain(
                    "replicaGrouping and anchors of weights, gradients or optimiser state need one process for each "
                    "replica.",
                    options=f"Distributed.processesPerReplica({self._count})",
                    fix="leave them out, or leave out processesPerReplica",
                )
            )

    # ---- what is handed over

    def _share(self) -> Share:
        counter = iter(range(10**9))
        crossing = self._crossing(counter)
        outputs = self._outputs(counter)
        met = self._met(counter)
        drawers = [self._places[name] for name, program in self._steps.items() if program.draws_random_numbers]
        own = len({ipu for ipu in range(self._ipus) if self._process_of(ipu) == self._index})
        homes = tuple(self._homes())
        guards, drawer = self._whole.guards, drawers[0] if drawers else None
        return Share(self._index, self._count, own, crossing, outputs, met, homes, guards, drawer)

    def _crossing(self, numbers: Iterable[int]) -> tuple[Handover, ...]:
        """The values that stages of other processes, or of this one, get from each other's processes."""
        takers: defaultdict[str, set[int]] = defaultdict(set)
        for name, program in self._steps.items():
            for spec in program.signature.passed:
                if spec.role is Role.BOUNDARY:
                    takers[spec.name].add(self._places[name])
        found = self._given({OutputRole.BOUNDARY})
        remote = {name: (giver, takers[name] - {giver}, value) for name, (giver, value) in found.items()}
        all_of_them = [_handover(n, i, *each) for i, (n, each) in zip(numbers, remote.items(), strict=False) if each[1]]
        return tuple(each for each in all_of_them if self._index == each.giver or self._index in each.takers)

    def _outputs(self, numbers: Iterable[int]) -> tuple[Handover, ...]:
        found = self._given({OutputRole.USER_OUTPUT, OutputRole.ANCHOR, OutputRole.GUARD})
        everyone = set(range(self._count))
        return tuple(
            _handover(name, number, giver, everyone - {giver}, value)
            for number, (name, (giver, value)) in zip(numbers, found.items(), strict=False)
        )

    def _given(self, roles: set[OutputRole]) -> dict[str, tuple[int, torch.Tensor]]:
        """What stages give, by name: the process, and what the value looks like."""
        return {
            spec.name: (self._places[name], value_of(node))
            for name, program in self._steps.items()
            for spec, node in program.graph.outputs
            if spec.role in roles
        }

    def _met(self, numbers: Iterable[int]) -> tuple[Handover, ...]:
        told = [
            (spec.name, process, value_of(node))
            for process, update in enumerate(self._updates)
            if update.told is not None
            for spec, node in update.told.outputs
        ]
        everyone = set(range(self._count))
        return tuple(
            _handover(name, number, giver, everyone - {giver}, value)
            for number, (name, giver, value) in zip(numbers, told, strict=False)
        )

    def _homes(self) -> Iterable[Home]:
        trained: Mapping[str, int] = self._parameter_homes()
        for spec in self._whole.state:
            users = self._users(spec)
            if spec.role in (Role.PARAMETER, Role.BUFFER) and users:
                yield Home(spec, trained.get(spec.name, min(users)))

    # ---- the schedule

    def _schedule(self) -> Schedule:
        """What the process does, and then a meeting of all."""
        whole = self._whole.schedule
        own = self._updates[self._index]
        instructions: list[Instruction] = [run for run in whole.runs if self._places[run.program] == self._index]
        last = whole.instructions[-1]
        slot = last.slot if isinstance(last, Commit) else last.slot + 1
        ipus = tuple(i for i in range(whole.ipus) if self._process_of(i) == self._index)
        if whole.reduction is not None:
            slot = whole.reduction.slot
            own_sums = {spec.name for graph in self._rare(self._index) for spec in graph.signature.state}
            sums = tuple(name for name in whole.reduction.accumulators if name in own_sums)
            instructions.append(replace(whole.reduction, accumulators=sums, ipus=ipus))
            slot += 1
        instructions.append(Meet(None if own.told is None else own.told.name, self._count, ipus, slot))
        if isinstance(last, Commit):
            updates = () if own.update is None else (own.update.name,)
            instructions.append(Commit(updates, ipus, slot + 1))
        return Schedule(tuple(instructions), whole.rounds, whole.micro_batches)


def _handover(name: str, number: int, giver: int, takers: Iterable[int], value: torch.Tensor) -> Handover:
    return Handover(name, number, giver, tuple(sorted(takers)), tuple(value.shape), tuple(value.stride()), value.dtype)


def _used_twice(spec: InputSpec, processes: list[int]) -> str:
    return explain(
        f"{spec.role.value} {spec.name} changes, and stages in processes {processes} use it: it lives in one of them.",
        options="Distributed.processesPerReplica",
        fix="put the blocks that share it on IPUs of one process, for example the first and the last stage on IPU 0",
    )
