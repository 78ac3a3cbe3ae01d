"""An executable from plain data, as `plain`, `origins_in` and `tensors_in` gave them.

Data may come from anywhere. They are read by the types that the fields are declared with, and what does not fit raises
`FormatError`; no code is run, and no name is looked up but those of ops, types and enumerations.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch

from poptorch.executable.checks import IndexCheck
from poptorch.executable.data import Data
from poptorch.executable.executable import AnchorPlan, Batching, Executable
from poptorch.executable.interface import Arguments, Interface
from poptorch.executable.program import Program
from poptorch.executable.schedule import Commit, Exchange, Gather, Meet, Reduce, Run, Schedule
from poptorch.executable.share import Handover, Home, Share
from poptorch.executable.state import GroupBinding, Grouping, Shard, StateBinding
from poptorch.executable.timeline import Task, Timeline
from poptorch.ir import Guard, InputSpec, OutputSpec, Role, SourceLine, StepGraph, verify
from poptorch.ir.ops import takes_turns
from poptorch.ir.ranges import Range
from poptorch.ir.serial import FormatError, graph_from, line_from
from poptorch.structure import Leaf, Structure, map_leaves, structure_from

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        AnchorPlan,
        Arguments,
        Batching,
        Commit,
        Exchange,
        Executable,
        Gather,
        GroupBinding,
        Grouping,
        Guard,
        Handover,
        Home,
        IndexCheck,
        InputSpec,
        Interface,
        Meet,
        OutputSpec,
        Program,
        Range,
        Reduce,
        Run,
        Schedule,
        Shard,
        Share,
        StateBinding,
        Task,
        Timeline,
    )
}


def executable_from(
    data: Mapping[str, Data], origins: Mapping[str, Data], tensors: Mapping[str, torch.Tensor]
) -> Executable:
    """The executable that data describe; `FormatError` if they describe none."""
    try:
        executable = _Reader(origins, tensors).read(Executable, data, "")
        for program in executable.programs:
            verify(program.graph)
        _check(executable)
    except FormatError:
        raise
    except Exception as error:  # whatever nonsense leads to
        raise FormatError(f"these data describe no executable: {type(error).__name__}: {error}") from error
    return executable


@dataclass(frozen=True)
class _Reader:
    """Reads values of declared types."""

    origins: Mapping[str, Data]
    tensors: Mapping[str, torch.Tensor]

    def read(self, hint: Any, data: Data, place: str) -> Any:
        """The value of this type that data describe; `place` is where it stands in the executable."""
        if hint == Structure:
            return structure_from(data)
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            return self._one_of(typing.get_args(hint), data, place)
        if typing.get_origin(hint) in (tuple, frozenset):
            return self._many(hint, data, place)
        if hint is StepGraph:
            return graph_from(data, self.origins[place], self._constants(data, place))
        if hint in _PLAIN:
            return _PLAIN[hint](data)
        if issubclass(hint, Enum):
            return hint[data]
        return self._fields(hint, data, place)

    def _one_of(self, options: tuple[Any, ...], data: Data, place: str) -> Any:
        if data is None and type(None) in options:
            return None
        named = {getattr(option, "__name__", ""): option for option in options if option is not type(None)}
        said = cast("dict[str, Data]", data).get("is") if isinstance(data, dict) else None
        chosen = next(iter(named.values())) if said is None else named[said]
        return self.read(chosen, data, place)

    def _many(self, hint: Any, data: Data, place: str) -> Any:
        if not isinstance(data, list):
            raise FormatError(f"{data!r} is no list")
        item = typing.get_args(hint)[0]
        items = cast("list[Data]", data)
        found = [self.read(item, each, f"{place}/{index}") for index, each in enumerate(items)]
        return frozenset(found) if typing.get_origin(hint) is frozenset else tuple(found)

    def _fields(self, kind: type, data: Data, place: str) -> Any:
        if _KINDS.get(data["is"]) is not kind:
            raise FormatError(f"{data['is']!r} is not {kind.__name__}")
        found: dict[str, Any] = {}
        for name, hint in typing.get_type_hints(kind).items():
            if name not in {field.name for field in dataclasses.fields(kind)}:
                continue
            here = f"{place}/{name}"
            if hint == (SourceLine | None):
                found[name] = line_from(self.origins.get(here))
            else:
                found[name] = self.read(hint, data[name], here)
        return kind(**found)

    def _constants(self, data: Data, place: str) -> dict[str, torch.Tensor]:
        """The constants of a graph and of those that belong to it."""
        found = {item[0]: self.tensors[f"{place}/{item[0]}"] for item in data["inputs"] if item[1] == _CONSTANT}
        for name, inner in data["graphs"].items():
            found.update(self._constants(inner, f"{place}/{name}"))
        return found


_CONSTANT = Role.CONSTANT.value


def _exactly(kind: type) -> Callable[[Data], Any]:
    def read(data: Data) -> Any:
        if type(data) is not kind:
            raise FormatError(f"{data!r} is no {kind.__name__}")
        return data

    return read


def _dtype(data: Data) -> torch.dtype:
    found = getattr(torch, str(data).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"{data!r} is no type of tensors")
    return found


def _size(data: Data) -> torch.Size:
    if any(type(length) is not int or length < 0 for length in data):
        raise FormatError(f"{data!r} is no shape")
    return torch.Size(data)


_PLAIN: dict[Any, Callable[[Data], Any]] = {
    bool: _exactly(bool),
    int: _exactly(int),
    str: _exactly(str),
    torch.dtype: _dtype,
    torch.Size: _size,
}


def _check(executable: Executable) -> None:
    """Raise if parts that have to fit together do not."""
    names = {program.name for program in executable.programs}
    batching, schedule, arguments = executable.batching, executable.schedule, executable.interface.arguments
    count = len(arguments.tensor_names)
    updates = {name for step in schedule.instructions if isinstance(step, Commit) for name in step.updates}
    facts = {
        "a schedule without programs": not executable.programs or not schedule.runs,
        "two programs of one name": len(names) != len(executable.programs),
        "an unknown program": not {run.program for run in schedule.runs} <= names,
        "an unknown update": not updates <= names,
        "an impossible reduction": not _is_possible(schedule.reduction, executable),
        "calls of functions, which no file may make": any(
            takes_turns(node) for program in executable.programs for node in program.graph.ops.nodes
        ),
        "no replicas": batching.replicas < 1 or batching.device_iterations < 1 or batching.micro_batches_per_update < 1,
        "an unknown replica": any(not 0 <= run.replica < batching.replicas for run in schedule.runs),
        "too many replicas": batching.replicas > _MOST,
        "an impossible grouping": any(len(g.of_replicas) != batching.replicas for g in executable.binding.groupings),
        "an impossible group": any(not 0 <= n < _MOST for g in executable.binding.groupings for n in g.of_replicas),
        "other micro-batches than it schedules": len(batching.sources) != schedule.rounds * schedule.micro_batches,
        "too many instructions": max(schedule.ipus, schedule.slots) > _MOST**2,
        "more room for gradients than for weights": _room_for_gradients(executable) > _room_for_weights(executable),
        "an impossible source": not batching.sources or min(batching.sources) < 0,
        "an impossible output": any(not 0 <= kept < batching.micro_batches for kept in batching.kept),
        "arguments of unknown types": not len(arguments.shapes) == len(arguments.dtypes) == count,
        "too many arguments": max([-1, *_leaves(arguments.args), *_leaves(arguments.kwargs)]) >= count,
        "too many results": max([-1, *_leaves(executable.interface.result)]) >= len(executable.outputs),
        "unknown inputs": len(executable.step.signature.user_inputs) != count,
    }
    wrong = [what for what, is_so in facts.items() if is_so]
    if wrong:
        raise FormatError(f"an executable with {', '.join(wrong)}")


_MOST = 4096  # replicas of one process


def _is_possible(reduction: Reduce | None, executable: Executable) -> bool:
    sums = {spec.name for spec in executable.state if spec.role is Role.ACCUMULATOR}
    return reduction is None or (sums.issuperset(reduction.accumulators) and 1 < reduction.processes <= _MOST**2)


def _room_for_gradients(executable: Executable) -> int:
    return sum(math.prod(spec.shape) for spec in executable.state if spec.role is Role.ACCUMULATOR)


def _room_for_weights(executable: Executable) -> int:
    """How many numbers gradients can have that are added up: as many as weights, and a few more."""
    weights = sum(math.prod(spec.shape) for spec in executable.state if spec.role is Role.PARAMETER)
    return 4 * weights + 2**20


def _leaves(structure: Structure) -> list[int]:
    found: list[int] = []

    def note(index: int) -> Leaf:
        found.append(index)
        return Leaf(index)

    map_leaves(structure, note)
    return found
