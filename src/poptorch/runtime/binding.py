"""Bring programs and tensors together: which memory every replica works on.

Most state is shared by all replicas and belongs to the user. What nobody else sees belongs to the binding: gradient
accumulators, the changing buffers of every replica but the first, and what is computed from weights before a call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from poptorch.engines import Bound, Kernel
from poptorch.executable import Commit, Exchange, Executable, Gather, Instruction, Meet, Program, Reduce
from poptorch.ir import InputSpec, Role, with_stride
from poptorch.runtime.random import RandomStreams
from poptorch.runtime.reduction import Flat, Reduction

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Binding:
    """The programs of an executable on the tensors of one moment."""

    replicas: list[dict[str, torch.Tensor]]
    actions: list[tuple[Instruction, list[Bound]]]  # each instruction of the schedule with what it runs
    volatile: list[torch.Tensor]  # what runs write before it is final, accumulators aside
    saved: list[torch.Tensor]  # what to go back to if it never becomes final
    accumulators: list[torch.Tensor]
    copied: tuple[str, ...]  # the buffers of which every replica but the first has its own
    reduction: Reduction | None  # of the accumulators, with other processes

    def take_copies(self, before: Binding) -> None:
        """Give replicas the values that they have in another binding of the same executable."""
        for replica, other in zip(self.replicas[1:], before.replicas[1:], strict=True):
            for name in self.copied:
                replica[name].copy_(other[name])


def bind(executable: Executable, kernels: Mapping[str, Kernel], state: State, random: RandomStreams) -> Binding:
    """Let programs work on these tensors: accumulators start at zero, replicas get copies of changing buffers."""
    return _Binder(executable, kernels, random).bind(state)


class _Binder:
    def __init__(self, executable: Executable, kernels: Mapping[str, Kernel], random: RandomStreams) -> None:
        self._executable, self._kernels, self._random = executable, kernels, random
        self._groupings = executable.binding.groupings
        self._shards = {shard.name: shard for shard in executable.binding.shards}
        self._owners = {spec.name: spec.owner for spec in executable.state}
        self._known: dict[tuple[object, ...], Bound] = {}

    def bind(self, state: State) -> Binding:
        executable = self._executable
        accumulators, reduction = self._accumulators()
        owned = {**executable.constants, **state, **accumulators}
        replicas = self._replicas(owned)
        volatile = self._volatile(replicas, accumulators)
        actions: list[tuple[Instruction, list[Bound]]] = []
        for instruction in executable.schedule.instructions:
            if isinstance(instruction, (Reduce, Gather)):
                bound = list[Bound]()
            elif isinstance(instruction, Exchange):
                bound = [self._bind(self._program(instruction.program), self._own_rows(owned))]
            elif isinstance(instruction, Meet):
                bound = [] if instruction.program is None else [self._bind(self._program(instruction.program), owned)]
            elif isinstance(instruction, Commit):
                parts = self._update_parts(self._own_rows(owned)) if instruction.updates else []
                bound = [self._bind(self._program(name), part) for name in instruction.updates for part in parts]
            else:
                ranks = range(instruction.replica, instruction.replica + instruction.replicas)
                seen = replicas[ranks[0]]
                if instruction.width > 1:  # it sees all entries of grouped parameters
                    seen = {**seen, **owned, **self._copies(replicas)}
                bound = [self._bind(self._program(instruction.program), seen, ranks)]
            actions.append((instruction, bound))
        saved, copied = [tensor.clone() for tensor in volatile], tuple(self._copied())
        return Binding(replicas, actions, volatile, saved, list(accumulators.values()), copied, reduction)

    def _accumulators(self) -> tuple[dict[str, torch.Tensor], Reduction | None]:
        """Where gradients are added up; those that other processes add to lie side by side."""
        specs = {spec.name: spec for spec in self._executable.state if spec.role is Role.ACCUMULATOR}
        schedule = self._executable.schedule
        if schedule.reduction is None:
            return {name: self._zeros(spec) for name, spec in specs.items()}, None
        reduction, shards = schedule.reduction, self._shards
        shared = {name: specs.pop(name) for name in reduction.accumulators}
        apart = {} if reduction.in_order else {name: self._zeros(shared[name]) for name in reduction.scattered}
        layouts = {n: (s.shape, self._stride(s), s.dtype) for n, s in shared.items() if n not in apart}
        flat = Flat.of(layouts, reduction.processes)
        own, together = {name: self._zeros(spec) for name, spec in specs.items()}, {**flat.tensors, **apart}
        scattered = [(together[name], shards[self._owners[name]]) for name in reduction.scattered]
        counters, micro_batches = list(own.values()), schedule.micro_batches
        return {**together, **own}, Reduction(reduction, flat, counters, micro_batches, scattered)

    def _own_rows(self, owned: State) -> dict[str, torch.Tensor]:
        """The state as the update of this process sees it; optimisers have state for its rows only."""
        if not self._shards:
            return dict(owned)
        specs = {spec.name: spec for spec in self._executable.state}
        roles = (Role.PARAMETER, Role.ACCUMULATOR)
        found: dict[str, torch.Tensor] = {}
        for name, tensor in owned.items():
            spec = specs.get(name)
            shard = None if spec is None or spec.role not in roles else self._shards.get(spec.owner)
            found[name] = tensor if shard is None else tensor.detach()[shard.rows]
        return found

    def _program(self, name: str) -> Program:
        return self._executable.program(name)

    def _written(self) -> set[str]:
        """The state that runs change before it is final."""
        return {name for run in self._executable.schedule.runs for name in self._program(run.program).written_state}

    def _copied(self) -> list[str]:
        """The buffers that runs change."""
        written = self._written()
        return [s.name for s in self._executable.state if s.role is Role.BUFFER and s.name in written]

    def _replicas(self, owned: State) -> list[dict[str, torch.Tensor]]:
        """The state that each replica sees."""
        buffers = self._copied()
        ranks = range(self._executable.batching.replicas)
        replicas = [self._part(owned, [g.of_replicas[rank] for g in self._groupings]) for rank in ranks]
        for replica in replicas[1:]:
            replica.update({name: owned[name].detach().clone() for name in buffers})
        is_wide = self._executable.schedule.width > 1
        parts = [owned] if is_wide else replicas if self._groupings else replicas[:1]
        derived = [self._derived(part) for part in parts]
        for rank, replica in enumerate(replicas):
            replica.update(derived[rank % len(derived)])
        return replicas

    def _copies(self, replicas: Sequence[State]) -> dict[str, torch.Tensor]:
        """The buffers of replicas after the first, for a program that runs for all of them."""
        copies = [spec for spec in self._executable.state if spec.role is Role.REPLICA]
        return {spec.name: replicas[int(spec.key)][spec.owner] for spec in copies}

    def _volatile(self, replicas: Sequence[State], accumulators: State) -> list[torch.Tensor]:
        """The tensors that runs write although it may have to be taken back, each once."""
        schedule = self._executable.schedule
        if not schedule.is_revocable:
            return []
        copies = {spec.name for spec in self._executable.state if spec.role is Role.REPLICA}
        names = self._written() - set(accumulators) - copies
        ordered = [spec.name for spec in self._executable.state if spec.name in names]
        tensors = {id(replica[name]): replica[name].detach() for replica in replicas for name in ordered}
        return list(tensors.values())

    def _zeros(self, spec: InputSpec) -> torch.Tensor:
        """An accumulator, with an entry for each group if it belongs to a grouped parameter."""
        groups = [grouping.groups for grouping in self._groupings if grouping.name == spec.owner]
        stride = self._stride(spec)
        if not groups:
            return torch.empty_strided(spec.shape, stride, dtype=spec.dtype).zero_()
        shape = (*groups, *spec.shape)
        return torch.empty_strided(shape, (math.prod(spec.shape), *stride), dtype=spec.dtype).zero_()

    def _part(self, owned: State, chosen: Sequence[int]) -> dict[str, torch.Tensor]:
        """The state in which each grouped parameter, and what belongs to it, is that of the chosen group."""
        entry = {grouping.name: group for grouping, group in zip(self._groupings, chosen, strict=True)}
        owners = self._owners
        return {n: t.detach()[entry[owners[n]]] if owners.get(n) in entry else t for n, t in owned.items()}

    def _update_parts(self, owned: State) -> list[dict[str, torch.Tensor]]:
        """The state for each run of the update: one run, or one for each group of the most finely grouped parameter.

        Runs after the first get copies of everything that was updated already, and nobody looks at those.
        """
        runs = max((grouping.groups for grouping in self._groupings), default=1)
        parts = [self._part(owned, [min(run, g.groups - 1) for g in self._groupings]) for run in range(runs)]
        for run, part in enumerate(parts[1:], start=1):
            due = {grouping.name for grouping in self._groupings if run < grouping.groups}
            for spec in self._executable.state:
                if spec.owner not in due and spec.role is not Role.HYPER:
                    part[spec.name] = part[spec.name].detach().clone()
        return parts

    def _derived(self, state: State) -> dict[str, torch.Tensor]:
        """What an inference step wants computed from the weights before it runs."""
        prepare = self._executable.prepare
        if prepare is None:
            return {}
        results = self._bind(prepare, state)([])
        specs = {spec.name: spec for spec in self._executable.state}
        named = zip((spec.name for spec in prepare.returned), results, strict=True)
        return {name: with_stride(tensor, self._stride(specs[name])) for name, tensor in named}

    def _stride(self, spec: InputSpec) -> tuple[int, ...]:
        wanted = [kernel.strides[spec.name] for kernel in self._kernels.values() if spec.name in kernel.strides]
        return wanted[0] if wanted else spec.stride

    def _bind(self, program: Program, state: State, ranks: range = range(1)) -> Bound:
        """A program on tensors; the same program on the same tensors is bound once, unless it draws for replicas."""
        tensors = [state[spec.name] for spec in program.state]
        key = (program.name, ranks if program.draws_random_numbers else 0, *map(id, tensors))
        if key not in self._known:
            generators = [self._random.generators[rank] for rank in ranks]
            self._known[key] = self._kernels[program.name].bind(tensors, generators)
        return self._known[key]
