"""Let each process update some rows of large parameters, and keep the optimiser's state for those only.

In:    an executable of one of several processes, in which each of them updates everything.
Out:   the same with an update of some rows. Before it come programs for what it needs to know about all rows.
Keeps: every value. A parameter whose update cannot be cut into rows stays whole, and the log says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from poptorch._logging import logger
from poptorch.compiler.passes import Observer
from poptorch.errors import CompileError, explain
from poptorch.executable import Commit, Exchange, Executable, Gather, Instruction, Program, Reduce, Shard
from poptorch.ir import (
    Direction,
    GraphBuilder,
    InputSpec,
    Note,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    note_of,
    value_of,
    verify,
)
from poptorch.ir.ops import ancestors, as_op
from poptorch.options import ProcessSettings

aten = torch.ops.aten

_UPDATING = Note(Direction.UPDATE)
_ELEMENTWISE = frozenset(  # what PyTorch does not mark so itself
    {
        aten._to_copy.default,
        aten.alias.default,
        aten.clone.default,
        aten.copy.default,
        aten.detach.default,
        aten.full_like.default,
        aten.ones_like.default,
        aten.zeros_like.default,
    }
)

_RESHAPING = frozenset({aten.expand.default, aten.view.default})  # captured optimisers call them for nothing


def take_rows(whole: Executable, processes: ProcessSettings, observe: Observer) -> Executable:
    """The executable of one process, which updates its rows of large parameters."""
    updates = [name for step in whole.schedule.instructions if isinstance(step, Commit) for name in step.updates]
    found: dict[str, _Sharded] = {}
    for name in updates:
        first = sum(len(each.exchanges) for each in found.values())
        found[name] = _shard(whole.program(name).graph, processes, first)
    shards = tuple(shard for each in found.values() for shard in each.shards)
    if not shards:
        return whole
    exchanges = tuple(graph for each in found.values() for graph in each.exchanges)
    programs = {program.name: program for program in whole.programs}
    programs.update((name, Program(each.update)) for name, each in found.items())
    steps = {program.name for program in whole.steps}
    sorted_programs = [p for p in programs.values() if p.name in steps]
    sorted_programs += [*map(Program, exchanges), *(p for p in programs.values() if p.name not in steps)]
    own = {spec.name: spec for program in sorted_programs for spec in program.state}
    state = {spec.name: own[spec.name] for spec in whole.state} | _kept_whole(whole, shards)
    for program in sorted_programs:
        verify(program.graph)
        if program.name not in steps:
            observe(program.name, program.graph)
    _check_anchors(whole, state)
    return replace(
        whole,
        programs=tuple(sorted_programs),
        schedule=replace(whole.schedule, instructions=_instructions(whole, shards, exchanges, processes)),
        binding=replace(whole.binding, inputs=tuple(state.values()), shards=shards),
        common=whole.common_digest,
    )


def _check_anchors(whole: Executable, state: Mapping[str, InputSpec]) -> None:
    """Raise for anchors of what no process has in one piece."""
    shapes = {spec.name: spec.shape for spec in whole.state}
    for anchor in whole.anchors:
        if anchor.state is not None and state[anchor.state].shape != shapes[anchor.state]:
            raise CompileError(
                explain(
                    f"the anchor {anchor.name!r} asks for {anchor.state}, of which each process has some rows only.",
                    options="TensorLocations, useReplicatedTensorSharding",
                    fix="leave out the anchor, and look at the optimiser's state after copyWeightsToHost()",
                )
            )


def _kept_whole(whole: Executable, shards: tuple[Shard, ...]) -> dict[str, InputSpec]:
    """Parameters and sums of gradients, of which steps see all rows."""
    names = {shard.name for shard in shards}
    roles = (Role.PARAMETER, Role.ACCUMULATOR)
    return {spec.name: spec for spec in whole.state if spec.role in roles and spec.owner in names}


def _instructions(
    whole: Executable, shards: tuple[Shard, ...], exchanges: tuple[StepGraph, ...], processes: ProcessSettings
) -> tuple[Instruction, ...]:
    names = {shard.name for shard in shards}
    owners = {spec.name: spec.owner for spec in whole.state}
    found: list[Instruction] = []
    for step in whole.schedule.instructions:
        if isinstance(step, Reduce):
            step = replace(step, scattered=tuple(name for name in step.accumulators if owners[name] in names))
        if not isinstance(step, Commit):
            found.append(step)
            continue
        slot = step.slot
        for graph in exchanges:
            (result,) = graph.signature.outputs
            found.append(Exchange(graph.name, result.name, processes.count, step.ipus, slot))
            slot += 1
        gathered = tuple(shard.name for shard in shards)
        found += [replace(step, slot=slot), Gather(gathered, processes.count, step.ipus, slot + 1)]
    return tuple(found)


# ---- one update


class _Sharded(NamedTuple):
    """An update of rows, what has to be exchanged before it, and the parameters whose rows are shared out."""

    update: StepGraph
    exchanges: tuple[StepGraph, ...]
    shards: tuple[Shard, ...]


def _shard(update: StepGraph, processes: ProcessSettings, first: int) -> _Sharded:
    """The update of the rows of one process; exchanges are counted from `first`."""
    chosen = {shard.name: shard for shard in _candidates(update, processes)}
    while True:
        spread = _Spread.of(update, chosen)
        if not spread.refused:
            return _Cut(update, chosen, spread, processes.count, first).sharded()
        for name, reason in spread.refused.items():
            logger.warning("every process keeps all rows of the optimiser's state for %s: %s.", name, reason)
            chosen.pop(name)


def _candidates(update: StepGraph, processes: ProcessSettings) -> list[Shard]:
    """The parameters that are large enough, and have rows for every process."""
    limits = [limit for limit in (processes.sharding.optimizer, processes.sharding.weights) if limit is not None]
    found: list[Shard] = []
    for spec in update.signature.inputs:
        is_trained = spec.role is Role.PARAMETER and spec.name in update.signature.written
        if not is_trained or not spec.shape or spec.dtype.is_complex or math.prod(spec.shape) < min(limits):
            continue
        per_process = math.ceil(spec.shape[0] / processes.count)
        bounds = tuple(min(rank * per_process, spec.shape[0]) for rank in range(processes.count + 1))
        if bounds[-2] < bounds[-1]:
            found.append(Shard(spec.name, bounds, processes.index, spec.shape))
    return found


class _Partial(NamedTuple):
    """A number that is computed from all rows: what a process can tell about its own, and how those are combined."""

    own: Any  # an op
    kwargs: dict[str, Any]
    combined: Any  # an op on the numbers of all processes
    arguments: tuple[Any, ...]
    factor: float = 1.0


_IN_PARTS = {  # reductions: what is computed of the rows of a process, and how the results of all are combined
    aten.sum.default: (aten.sum.default, aten.sum.default),
    aten.sum.dim_IntList: (aten.sum.default, aten.sum.default),
    aten.mean.default: (aten.sum.default, aten.sum.default),
    aten.mean.dim: (aten.sum.default, aten.sum.default),
    aten.max.default: (aten.amax.default, aten.amax.default),
    aten.amax.default: (aten.amax.default, aten.amax.default),
    aten.min.default: (aten.amin.default, aten.amin.default),
    aten.amin.default: (aten.amin.default, aten.amin.default),
    aten.any.default: (aten.any.default, aten.amax.default),
    aten.all.default: (aten.all.default, aten.amin.default),
}


def _partial(node: fx.Node) -> _Partial | None:
    """How a reduction of everything is done in parts; None if the op is none, or leaves a dimension."""
    op, value = as_op(node.target), value_of(node)
    if op is None or not isinstance(value, torch.Tensor) or value.dim():
        return None
    kwargs = {"dtype": node.kwargs["dtype"]} if "dtype" in node.kwargs else {}
    if op is aten.linalg_vector_norm.default:
        order = node.args[1] if len(node.args) > 1 else node.kwargs.get("ord", 2)
        counts = order == 0  # the elements that are not zero
        return _Partial(op, {"ord": order, **kwargs}, *((aten.sum.default, ()) if counts else (op, (order,))))
    if op not in _IN_PARTS:
        return None
    own, combined = _IN_PARTS[op]
    numbers = math.prod(value_of(node.all_input_nodes[0]).shape) if "mean" in op.name() else 1
    return _Partial(own, kwargs, combined, (), 1 / numbers)


@dataclass(frozen=True)
class _Spread:
    """How the values of an update depend on rows that are shared out."""

    rows: Mapping[fx.Node, str]  # values that have a row for each of a parameter
    partials: Mapping[fx.Node, tuple[int, _Partial]]  # numbers about all rows, each with the exchange that brings it
    refused: Mapping[str, str]  # parameters whose update needs all rows, and why

    @classmethod
    def of(cls, update: StepGraph, chosen: Mapping[str, Shard]) -> _Spread:
        rows: dict[fx.Node, str] = {}
        partials: dict[fx.Node, tuple[int, _Partial]] = {}
        refused: dict[str, str] = {}
        turns: dict[fx.Node, int] = {}  # how many exchanges come before a value is known
        for spec, node in update.inputs:
            turns[node] = 0
            if spec.owner not in chosen:
                continue
            if spec.shape == chosen[spec.owner].shape:
                rows[node] = spec.owner
            elif spec.shape:
                refused.setdefault(spec.owner, f"{spec.key} has another shape")
        for node in update.ops.nodes:
            if node.op != "call_function":
                continue
            turns[node] = max((turns[used] for used in node.all_input_nodes), default=0)
            owners = {rows[used] for used in node.all_input_nodes if used in rows}
            if not owners:
                continue
            if len(owners) == 1 and _keeps_rows(node, *(chosen[name].shape for name in owners)):
                rows[node] = owners.pop()
            elif len(owners) == 1 and (partial := _partial(node)) is not None:
                partials[node] = (turns[node], partial)
                turns[node] += 1
            else:
                for name in owners:
                    refused.setdefault(name, f"{node.target} needs them together")
        cut = {spec.name: spec.owner for spec, node in update.inputs if node in rows}
        for spec, node in update.outputs:
            owner = cut.get(spec.name)
            if owner is not None and rows.get(node) != owner:
                refused.setdefault(owner, f"{spec.name} does not depend on its rows one by one")
        return cls(rows, partials, refused)


def _keeps_rows(node: fx.Node, shape: tuple[int, ...]) -> bool:
    """Whether each row of the result, which has this shape, is computed from the same row of the operands."""
    op, value = as_op(node.target), value_of(node)
    if op is None or not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
        return False
    operands = [value_of(used) for used in node.all_input_nodes]
    if op in _RESHAPING:
        return tuple(operands[0].shape) == shape
    is_elementwise = op in _ELEMENTWISE or torch.Tag.pointwise in op.tags
    return is_elementwise and all(isinstance(operand, torch.Tensor) for operand in operands)


class _Cut:
    """Builds the programs of one process."""

    def __init__(
        self, update: StepGraph, chosen: Mapping[str, Shard], spread: _Spread, processes: int, first: int
    ) -> None:
        self._update, self._chosen, self._spread = update, chosen, spread
        self._processes, self._first = processes, first
        turns = 1 + max((turn for turn, _ in spread.partials.values()), default=-1)
        self._told = [[n for n, (at, _) in spread.partials.items() if at == turn] for turn in range(turns)]

    def sharded(self) -> _Sharded:
        exchanges = tuple(self._exchange(turn) for turn in range(len(self._told)))
        return _Sharded(self._own_update(), exchanges, tuple(self._chosen.values()))

    def _exchange(self, turn: int) -> StepGraph:
        """What a process tells the others about its rows: a vector of numbers."""
        told = self._told[turn]
        operands = [used for node in told for used in node.all_input_nodes]
        builder = self._begin(operands, turn)
        numbers = [self._tell(builder, node) for node in told]
        vector = builder.call(_UPDATING, aten.stack.default, numbers)
        builder.output(OutputSpec(self._name("met:", turn), OutputRole.BOUNDARY), vector)
        return builder.build(self._name("exchange", turn), constants=self._update.constants)

    def _tell(self, builder: GraphBuilder, node: fx.Node) -> fx.Node:
        partial = self._spread.partials[node][1]
        (operand,) = node.all_input_nodes
        note = note_of(node) or _UPDATING
        number = builder.call(note, partial.own, builder.copies[operand], **partial.kwargs)
        return builder.cast(note, number, torch.float64)

    def _own_update(self) -> StepGraph:
        outputs = self._update.outputs
        builder = self._begin([node for _, node in outputs], len(self._told))
        for spec, node in outputs:
            builder.output(spec, builder.copies[node])
        return builder.build(self._update.name, constants=self._update.constants, graphs=self._update.graphs)

    def _begin(self, wanted: list[fx.Node], turn: int) -> GraphBuilder:
        """A graph of all that is needed for these values, as far as it is not exchanged before this turn."""
        known = {node for told in self._told[:turn] for node in told}
        needed = ancestors(wanted, stop=known)
        written = self._update.signature.written if turn == len(self._told) else ()
        builder = GraphBuilder()
        for spec, node in self._update.inputs:
            if node in needed or spec.name in written:
                builder.input(self._seen(spec, node), node)
        for node in self._update.ops.nodes:
            if node not in needed or node.op != "call_function":
                continue
            if node in known:
                builder.copies[node] = self._combine(builder, node)
            elif node in self._spread.rows:
                builder.copies[node] = self._on_rows(builder, node)
            else:
                builder.copy([node])
        return builder

    def _seen(self, spec: InputSpec, node: fx.Node) -> InputSpec:
        """An input as the update of this process sees it."""
        owner = self._spread.rows.get(node)
        return spec if owner is None else replace(spec, shape=self._chosen[owner].own_shape)

    def _on_rows(self, builder: GraphBuilder, node: fx.Node) -> fx.Node:
        """The same op on the rows of this process."""
        shard = self._chosen[self._spread.rows[node]]
        note = note_of(node) or _UPDATING
        if node.target in _RESHAPING:
            return builder.copies[node.all_input_nodes[0]]

        def own(operand: fx.Node) -> fx.Node:
            copied = builder.copies[operand]
            shape = tuple(value_of(copied).shape)
            if operand in self._spread.rows or len(shape) < len(shard.shape) or shape[0] == 1:
                return copied
            return builder.call(note, aten.slice.Tensor, copied, 0, shard.rows.start, shard.rows.stop)

        args: Any = fx.map_arg(node.args, own)
        kwargs: Any = fx.map_arg(node.kwargs, own)
        return builder.call(note, node.target, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def _combine(self, builder: GraphBuilder, node: fx.Node) -> fx.Node:
        """A number about all rows, from what the processes have told about theirs."""
        turn, partial = self._spread.partials[node]
        name, told = self._name("met:", turn), self._told[turn]
        met = builder.node(name)
        if met is None:
            shape = (self._processes, len(told))
            met = builder.input(InputSpec(name, Role.BOUNDARY, shape, torch.float64, (len(told), 1)))
        note = note_of(node) or _UPDATING
        numbers = builder.call(note, aten.select.int, met, 1, told.index(node))
        number = builder.call(note, partial.combined, numbers, *partial.arguments)
        if partial.factor != 1:
            number = builder.call(note, aten.mul.Tensor, number, partial.factor)
        return builder.cast(note, number, value_of(node).dtype)

    def _name(self, prefix: str, turn: int) -> str:
        return f"{prefix}{self._first + turn}"
