"""A graph that calls others, cut into what code is generated for: the calls, and the parts before, between and after.

Parts run in order. What one computes for others goes into a table, from which they are given it: first the state, then
views of it, then the tensors of the user, then the results of parts. A result is dropped after its last reader.

Numbers that many calls take one each, such as the bias corrections of an optimiser, are computed as a vector. It has
memory of its own while the program is bound, as state has, so that its elements are views that are found once.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from poptorch.ir import (
    GraphBuilder,
    InputSpec,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    call_graph,
    describe,
    value_of,
)
from poptorch.ir.excerpt import shows_other, with_views
from poptorch.ir.ops import is_view


@dataclass(frozen=True)
class View:
    """One step from a tensor to a part of it, or to another way to see it."""

    op: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Source:
    """State, or what is kept like state, that is seen through views."""

    position: int
    views: tuple[View, ...]

    def find(self, state: Sequence[torch.Tensor]) -> torch.Tensor:
        tensor = state[self.position]
        for view in self.views:
            tensor = view.op(tensor, *view.args)
        is_same_memory = tensor.untyped_storage().data_ptr() == state[self.position].untyped_storage().data_ptr()
        assert is_same_memory, "what is written to a view of state must reach the state"
        return tensor


@dataclass(frozen=True)
class Part:
    """One run of a graph on tensors of the table; its results go to the places from `first` on."""

    graph: str
    operands: tuple[int, ...]
    first: int
    results: int
    dropped: tuple[int, ...] = ()  # places that nobody reads any more


@dataclass(frozen=True)
class Cut:
    """Parts in the order in which they run, and the table that they work on."""

    parts: tuple[Part, ...]
    returned: tuple[int, ...]  # places of what the whole returns
    views: tuple[Source, ...] = ()  # of state
    kept: tuple[InputSpec, ...] = ()  # memory that follows the state, and is written anew in every run
    own: Mapping[str, StepGraph] | None = None  # the graphs of parts that are no calls

    @property
    def is_whole(self) -> bool:
        """Whether it is a single part that takes everything as it is, and returns everything."""
        return len(self.parts) == 1 and not self.views and self.parts[0].results == len(self.returned)


def cut_at_calls(graph: StepGraph) -> Cut:
    """Take the calls out of a graph, and make the rest graphs of their own."""
    if not any(node.target is call_graph for node in graph.ops.nodes):
        operands, returned = len(graph.signature.inputs), _returned_count(graph)
        places = tuple(range(operands, operands + returned))
        return Cut((Part(graph.name, tuple(range(operands)), operands, returned),), places, own={graph.name: graph})
    return _Cutter(graph).cut()


def _returned_count(graph: StepGraph) -> int:
    return sum(spec.role is not OutputRole.NEW_VALUE for spec in graph.signature.outputs)


_MANY_KEPT = 2**16  # elements of a vector that has memory of its own; a longer one is handed over as it is


class _Cutter:
    """Which op belongs to which segment: those of calls have odd numbers, what comes before, between and after even.

    Views may be computed anywhere, so each segment makes those that it needs.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.specs = {node: spec for spec, node in graph.inputs}
        state = [node for node, spec in self.specs.items() if spec.role.is_state]
        self.state = {node: index for index, node in enumerate(state)}  # and where it is in the table
        self.calls = [node for node in graph.ops.nodes if node.target is call_graph]
        self.last = 2 * len(self.calls)
        self.home = self._homes()
        self.order = {node: index for index, node in enumerate(self.home)}
        self.strides: dict[fx.Node, tuple[int, ...]] = {}  # the memory layouts that calls want
        self.views: dict[fx.Node, Source] = {}
        self.kept: dict[fx.Node, fx.Node] = {}  # the input for the memory of each value that is kept
        self.ops: defaultdict[int, list[fx.Node]] = defaultdict(list)
        self.exported: defaultdict[int, list[fx.Node]] = defaultdict(list)
        self.taken: dict[int, list[fx.Node]] = {}
        self.written: defaultdict[int, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)

    def _homes(self) -> dict[fx.Node, int]:
        """The segment that computes each value, -1 for inputs; views are where what they show is."""
        found: dict[fx.Node, int] = {}
        number = 0
        for node in self.graph.ops.nodes:
            if node.op == "placeholder":
                found[node] = -1
            elif node.target is call_graph:
                found[node] = number + 1
                number += 2
            elif shows_other(node) or is_result_of_call(node):
                found[node] = found[node.all_input_nodes[0]]
            else:
                found[node] = number
        return found

    def cut(self) -> Cut:
        for node in self.graph.ops.nodes:
            is_own = node.op == "call_function" and node.target is not call_graph
            if is_own and not shows_other(node) and not is_result_of_call(node):
                self.ops[self.home[node]].append(node)
        for number, call in enumerate(self.calls):
            self.taken[2 * number + 1] = [self._operand(node) for node in self._operands(call)]
        returned = [self._wanted(node) for spec, node in self.graph.outputs if spec.role is not OutputRole.NEW_VALUE]
        self._find_writes()
        for number in sorted(
            number for number in {*self.ops, *self.written} if self.ops[number] or self.written[number]
        ):
            self._take(number)
        for node in {used: None for number in self.taken for used in self.taken[number]}:
            self._export(node)
        return self._numbered(returned)

    def _operands(self, call: fx.Node) -> list[fx.Node]:
        name, operands = cast("tuple[str, list[fx.Node]]", call.args)
        for spec, node in zip(self.graph.graphs[name].signature.inputs, operands, strict=True):
            given = value_of(node).stride() if is_result_of_call(node) else self.strides.setdefault(node, spec.stride)
            assert _are_alike(given, spec), f"{node} has the strides {given}, and {spec} needs {spec.stride}"
        return operands

    def _operand(self, node: fx.Node) -> fx.Node:
        """What a call is given: state is seen through views once, everything else is computed as it is wanted."""
        base, views = _seen_through(node)
        if base is node:
            return self._wanted(node)
        if self._can_be_kept(base):
            base = self._keep(base)
        if base not in self.state:
            return self._wanted(node)
        steps = tuple(View(view.target, view.args[1:]) for view in views)
        self.views[node] = Source(self.state[base], steps)
        return node

    def _can_be_kept(self, node: fx.Node) -> bool:
        """Whether a part computes this, and it is a short vector, which can be seen through any view."""
        if self.home[node] % 2 or node in self.specs:
            return False
        value = value_of(node)
        return value.dim() == 1 and value.is_contiguous() and value.numel() <= _MANY_KEPT

    def _keep(self, node: fx.Node) -> fx.Node:
        """The input that stands for the memory of a value: it is written where the value is computed."""
        if node not in self.kept:
            spec = InputSpec.of(f"kept:{len(self.kept)}", Role.BUFFER, value_of(node))
            memory = self.kept[node] = fx.Graph().placeholder(f"kept_{len(self.kept)}")
            memory.meta["val"] = value_of(node)
            self.specs[memory], self.state[memory] = spec, len(self.state)
            self.written[self.home[node]].append((memory, node))
        return self.kept[node]

    def _wanted(self, node: fx.Node) -> fx.Node:
        """Let a value be computed by a segment, if it is not an input or the result of a call."""
        if node in self.specs or is_result_of_call(node):
            return node
        home = self.home[node]
        home = max(home + home % 2, 0)  # a view of what a call gives is made right after the call
        if node not in self.ops[home]:
            self.ops[home].append(node)
        if node not in self.exported[home]:
            self.exported[home].append(node)
        return node

    def _export(self, node: fx.Node) -> None:
        """Let the segment that computes a value give it to others."""
        if node not in self.specs and node not in self.views and not is_result_of_call(node):
            self._wanted(node)

    def _find_writes(self) -> None:
        """Where new values are written: where they are computed or, if the old one is still read, in the end."""
        names = {spec.name: node for node, spec in self.specs.items()}
        last_read = self._last_reads()
        for spec, value in self.graph.outputs:
            if spec.role is not OutputRole.NEW_VALUE or self._is_written_by_call(value):
                continue
            target, home = names[spec.name], max(self.home[value], 0)
            is_read = last_read.get(target, -1) > home
            assert self.home[value] >= 0 or not is_read, f"{spec} is an input, and read after it is written"
            self.written[self.last if is_read or home % 2 else home].append((target, value))

    def _is_written_by_call(self, value: fx.Node) -> bool:
        base, _ = _seen_through(value)
        if not is_result_of_call(base):
            return False
        call, index = cast("tuple[fx.Node, int]", base.args)
        return self._called(call).signature.outputs[index].role is OutputRole.NEW_VALUE

    def _called(self, call: fx.Node) -> StepGraph:
        return self.graph.graphs[cast("str", call.args[0])]

    def _last_reads(self) -> dict[fx.Node, int]:
        """The last segment that reads each value from outside."""
        found: dict[fx.Node, int] = {}
        for number, ops in self.ops.items():
            for node in with_views(ops, set(ops))[1]:
                found[node] = max(number, found.get(node, -1))
        for number, operands in self.taken.items():  # so far those of calls
            for node in operands:
                base, _ = _seen_through(node)
                found[base] = max(number, found.get(base, -1))
        return found

    def _take(self, number: int) -> None:
        """What a segment that is no call takes from outside, state first."""
        ops = self.ops[number] = sorted(self.ops[number], key=self.order.__getitem__)
        for _, value in self.written[number]:
            if shows_other(value) and value not in ops:
                ops.append(value)
        _, outside = with_views(ops, set(ops))
        for target, value in self.written[number]:
            outside += [node for node in (target, value) if node not in outside and node not in ops]
        self.taken[number] = sorted(outside, key=lambda node: not self._spec(node, 0).role.is_state)

    def _spec(self, node: fx.Node, index: int) -> InputSpec:
        if node in self.specs:
            return self.specs[node]
        spec = InputSpec.of(f"value:{index}", Role.BOUNDARY, value_of(node))
        return replace(spec, stride=self.strides.get(node, spec.stride))

    def _graph(self, number: int) -> StepGraph:
        """The graph of a segment that is no call."""
        builder = GraphBuilder()
        for index, node in enumerate(self.taken[number]):
            builder.input(self._spec(node, index), node)
        copied, _ = with_views(self.ops[number], set(self.ops[number]))
        builder.copy(copied)
        for index, node in enumerate(self.exported[number]):
            result = builder.copies[node]
            if node in self.strides and value_of(result).stride() != self.strides[node]:
                result.meta = {**result.meta, "val": describe(self._spec(node, index))}
            builder.output(OutputSpec(f"result:{index}", OutputRole.BOUNDARY), result)
        for target, value in self.written[number]:
            builder.output(OutputSpec(self.specs[target].name, OutputRole.NEW_VALUE), builder.copies[value])
        return builder.build(f"{self.graph.name}-{number // 2}", graphs=self.graph.graphs)

    def _numbered(self, returned: Sequence[fx.Node]) -> Cut:
        """Give everything its place in the table."""
        order = [*self.state, *self.views, *(node for node in self.specs if node not in self.state)]
        place = {node: index for index, node in enumerate(order)}
        parts: list[Part] = []
        own: dict[str, StepGraph] = {}
        size = len(order)
        for number in sorted(self.taken):
            operands = tuple(place[node] for node in self.taken[number])
            if number % 2:
                call = self.calls[number // 2]
                name, results = cast("str", call.args[0]), _returned_count(self._called(call))
                place.update({user: size + user.args[1] for user in call.users if user.args[1] < results})  # pyright: ignore
            else:
                graph = self._graph(number)
                name, results = graph.name, len(self.exported[number])
                own[name] = graph
                place.update({node: size + index for index, node in enumerate(self.exported[number])})
            parts.append(Part(name, operands, size, results))
            size += results
        places = tuple(place[node] for node in returned)
        kept = tuple(self.specs[memory] for memory in self.kept.values())
        return Cut(_dropping(parts, len(order), places), places, tuple(self.views.values()), kept, own)


def _dropping(parts: Sequence[Part], inputs: int, returned: Sequence[int]) -> tuple[Part, ...]:
    """Let every part drop the results that nobody reads after it."""
    last = {
        place: number for number, part in enumerate(parts) for place in range(part.first, part.first + part.results)
    }
    for number, part in enumerate(parts):
        last.update({place: number for place in part.operands if place >= inputs})
    dropped: defaultdict[int, list[int]] = defaultdict(list)
    for place, number in last.items():
        if place not in returned:
            dropped[number].append(place)
    return tuple(replace(part, dropped=tuple(dropped[number])) for number, part in enumerate(parts))


def _are_alike(stride: Sequence[int], spec: InputSpec) -> bool:
    """Whether strides lead to the same elements as those of an input; where there is one element only, any do."""
    return all(a == b or size == 1 for a, b, size in zip(stride, spec.stride, spec.shape, strict=True))


def is_result_of_call(node: fx.Node) -> bool:
    """Whether a node is one of the results of a call."""
    return node.target is operator.getitem and cast("fx.Node", node.args[0]).target is call_graph


def _seen_through(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What an operand is a view of, and the views from there to it."""
    views: list[fx.Node] = []
    while is_view(node):
        views.insert(0, node)
        node = node.all_input_nodes[0]
    return node, views
