"""Whose the tensors are that programs keep from call to call: the module's, an optimiser's, or the program's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from poptorch.ir import InputSpec, Role


@dataclass(frozen=True)
class GroupBinding:
    """Parameters that share the numbers of one group of an optimiser, and follow one rule."""

    index: int  # counted over all optimisers
    optimizer: int
    position: int  # among the groups of its optimiser
    parameters: tuple[str, ...]
    rule: str  # what an update does, as text


@dataclass(frozen=True)
class Grouping:
    """A parameter that has one entry per group of replicas, in a first dimension that programs do not see."""

    name: str
    of_replicas: tuple[int, ...]  # the group of each replica

    @property
    def groups(self) -> int:
        return max(self.of_replicas) + 1


@dataclass(frozen=True)
class Shard:
    """A parameter of which each process updates some rows, and has the optimiser's state for those only."""

    name: str
    bounds: tuple[int, ...]  # where the rows of each process begin, and where those of the last one end
    process: int
    shape: tuple[int, ...]

    @property
    def rows(self) -> slice:
        """The rows of this process."""
        return slice(self.bounds[self.process], self.bounds[self.process + 1])

    @property
    def own_shape(self) -> tuple[int, ...]:
        return (self.rows.stop - self.rows.start, *self.shape[1:])


@dataclass(frozen=True)
class StateBinding:
    """Every state input of every program, once, with what leads from it to its owner."""

    inputs: tuple[InputSpec, ...]
    groups: tuple[GroupBinding, ...] = ()
    groupings: tuple[Grouping, ...] = ()
    shards: tuple[Shard, ...] = ()

    def owner(self, spec: InputSpec) -> str:
        """Where the tensor of an input is kept, in words."""
        if spec.role in (Role.PARAMETER, Role.BUFFER):
            return f"{spec.role.value} {spec.name} of the module"
        if spec.group is not None:
            group = next(group for group in self.groups if group.index == spec.group)
            return f"{spec.key} of group {group.position} of optimiser {group.optimizer}"
        if spec.role is Role.OPTIMIZER_STATE and spec.owner:
            group = next(group for group in self.groups if spec.owner in group.parameters)
            return f"{spec.key} of {spec.owner} in the state of optimiser {group.optimizer}"
        if spec.role in (Role.HYPER, Role.OPTIMIZER_STATE):
            return f"{spec.key} of the loss"
        return f"{spec.role.value} of the program itself"

    def __str__(self) -> str:
        return "\n".join(_print(self))


def _print(binding: StateBinding) -> Iterator[str]:
    yield "state:"
    width = max((len(str(spec)) for spec in binding.inputs), default=0)
    for spec in binding.inputs:
        yield f"  {spec!s:<{width}}  {binding.owner(spec)}"
    for grouping in binding.groupings:
        yield f"  {grouping.name} has an entry for each of {grouping.groups} groups of replicas"
    for shard in binding.shards:
        yield f"  rows {shard.rows.start} to {shard.rows.stop - 1} of {shard.shape[0]} of {shard.name} are updated here"
