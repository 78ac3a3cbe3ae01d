"""Find layers that are alike, and let each kind of them be one graph that is called for every occurrence.

In:    a StepGraph.
Out:   the same graph in which stretches of ops that repeat, forwards or backwards, are calls of graphs that belong to
       this one. Two stretches share a graph if they have the same ops with the same constants in the same order, wired
       in the same way, on tensors of the same type, size and memory layout. Ops of the backward pass stand right after
       what they use, so that what is done with a layer's gradients belongs to the layer.
Keeps: every value, the signature.

Compilers take longer than twice the time for a program of twice the length. Code for one layer serves all of them.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from poptorch.engines.host import Host
from poptorch.engines.passes.draw_ahead import calls_python
from poptorch.engines.passes.repeats import Repeat, find_repeats
from poptorch.ir import (
    Direction,
    GraphBuilder,
    InputSpec,
    Note,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    call_graph,
    note_of,
    runs_of,
    update_value,
    value_of,
)
from poptorch.ir.excerpt import shows_other, with_views
from poptorch.ir.ops import memory_owner

aten = torch.ops.aten
_FEWEST_OPS = 40  # of a graph that is called; shorter layers are taken several at a time, as a call has its cost
_FEWEST_CALLS = 4
_FEWEST_SAVED = 100  # ops that need not be compiled again, for which seams are worth it
_FEW_STEPS = 8  # from a gradient to where it ends, when it was cast, added up or looked at
_MANY_OPERANDS = 8
_NEVER = 2**60  # bytes: the price of a seam through a value that cannot be handed over
_VIEWS = (aten.view.default, aten._unsafe_view.default)


def outline_layers(graph: StepGraph, host: Host) -> StepGraph:
    """Let layers that are alike be calls of a few graphs."""
    if host.fewest_layers < 2 or graph.count_ops() < _FEWEST_SAVED or calls_python(graph):
        return graph
    sequence = _Sequence(_laid_out(graph, host))
    kinds = sequence.kinds(host.fewest_layers)
    return sequence.outlined(kinds) if kinds else graph


def _laid_out(graph: StepGraph, host: Host) -> StepGraph:
    """The graph with values whose memory layout follows from that of the inputs, which weights of images change."""
    if not any(spec.owner in host.channels_last for spec in graph.signature.state):
        return graph
    ops = graph.copy_ops()
    for node in ops.nodes:
        if node.op == "call_function" and not runs_of(node) and not _is_result_of_call(node):
            if node.target in _VIEWS:  # it may have to copy now
                node.target = aten.reshape.default
            update_value(node)
    return replace(graph, ops=ops)


def _is_result_of_call(node: fx.Node) -> bool:
    return node.target is operator.getitem and bool(runs_of(cast("fx.Node", node.args[0])))


@dataclass(frozen=True)
class _Occurrence:
    """A stretch of ops, with what they take from outside: first the state that they write."""

    start: int
    end: int
    ops: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    written: tuple[tuple[fx.Node, fx.Node], ...]  # inputs of the whole with their new values
    key: Hashable  # the same for two stretches if the graph of one can stand for that of the other


@dataclass(frozen=True)
class _Kind:
    """Occurrences that are alike, and the places of the ops whose results are used outside of one of them."""

    occurrences: tuple[_Occurrence, ...]
    given: tuple[int, ...]

    def graph(self, name: str) -> StepGraph:
        """The graph for all of them, made of the ops of the first."""
        first = self.occurrences[0]
        builder = GraphBuilder()
        for index, node in enumerate(first.operands):
            is_written = index < len(first.written)
            role = Role.ACCUMULATOR if is_written else Role.BOUNDARY
            builder.input(InputSpec.of(f"operand:{index}", role, value_of(node)), node)
        builder.copy(first.ops)
        for place in self.given:
            builder.output(OutputSpec(f"value:{place}", OutputRole.BOUNDARY), builder.copies[first.ops[place]])
        for index, (_, value) in enumerate(first.written):
            builder.output(OutputSpec(f"operand:{index}", OutputRole.NEW_VALUE), builder.copies[value])
        return builder.build(name)


class _Sequence:
    """The ops of a graph in an order in which layers stand one after the other; views go where they are used."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        nodes = [node for node in graph.ops.nodes if node.op == "call_function"]
        self._shown: dict[fx.Node, fx.Node] = {node: node for node in graph.placeholders}  # through views
        for node in nodes:
            is_moved = shows_other(node) and not any(user.op == "output" or runs_of(user) for user in node.users)
            self._shown[node] = self._shown[node.all_input_nodes[0]] if is_moved else node
        self.ops = self._ordered([node for node in nodes if self._shown[node] is node])
        self.place = {node: index for index, node in enumerate(self.ops)}
        self.readers: defaultdict[fx.Node, list[int]] = defaultdict(list)
        for index, node in enumerate(self.ops):
            for used in self._used(node):
                self.readers[used].append(index)
        self._results = {node for _, node in graph.outputs}
        self._writable = self._find_writable()

    def _used(self, node: fx.Node) -> list[fx.Node]:
        """What an op computes its result from, looking through views."""
        return list(dict.fromkeys(self._shown[used] for used in node.all_input_nodes))

    def _ordered(self, ops: Sequence[fx.Node]) -> list[fx.Node]:
        """What is done with gradients, and parts of results, right after what they use; the others as they were."""
        self.moved: set[fx.Node] = set()
        updates_by_calls = any(node.target is call_graph for node in ops)
        heights, ends = self._heights(ops), self._ends(ops)
        anchors: dict[fx.Node, int] = {}
        for index, node in enumerate(ops):
            latest = max(self._used(node), key=lambda used: anchors.get(used, -1), default=None)
            anchors[node] = index
            if latest is None or latest not in anchors or runs_of(node):
                continue
            is_last = _direction(node) is Direction.BACKWARD and heights[node] <= _FEW_STEPS and len(ends[node]) < 2
            may_move = is_last or (_direction(node) is Direction.UPDATE and updates_by_calls)
            of_gradient = _direction(latest) is Direction.BACKWARD or latest in self.moved
            if node.target is operator.getitem or (may_move and of_gradient):
                anchors[node] = anchors[latest]
                if of_gradient and not runs_of(latest):
                    self.moved.add(node)
        numbers = {node: index for index, node in enumerate(ops)}
        return sorted(ops, key=lambda node: (anchors[node], numbers[node]))

    def _heights(self, ops: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """How many ops follow from each, at most; a path ends where many values meet, as in a norm of all."""
        heights = dict.fromkeys(ops, 0)
        for node in reversed(ops):
            used = self._used(node)
            above = 0 if runs_of(node) or len(used) > _MANY_OPERANDS else heights[node] + 1
            for each in used:
                if each in heights:
                    heights[each] = max(heights[each], above)
        return heights

    def _ends(self, ops: Sequence[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
        """Where what each op computes ends, up to two places: in calls that update, or in what is written."""
        written = {self._shown[n] for spec, n in self.graph.outputs if spec.role is OutputRole.NEW_VALUE}
        ends: defaultdict[fx.Node, frozenset[fx.Node]] = defaultdict(frozenset)
        for node in reversed(ops):
            used = self._used(node)
            if node in written:
                ends[node] |= {node}
            after = frozenset({node}) if runs_of(node) else ends[node] if len(used) <= _MANY_OPERANDS else frozenset()
            for each in used:
                if len(ends[each]) < 2:
                    ends[each] |= after
        return ends

    def _find_writable(self) -> dict[fx.Node, list[tuple[fx.Node, int]]]:
        """For each op, the inputs that its result is the new value of, and up to where their old value is read.

        Left out are inputs that the caller is shown: they have to keep their value to the end.
        """
        inputs = {spec.name: node for spec, node in self.graph.inputs if spec.role.is_state}
        shown = {memory_owner(node) for _, node in self.graph.outputs}
        found: defaultdict[fx.Node, list[tuple[fx.Node, int]]] = defaultdict(list)
        for spec, node in self.graph.outputs:
            target = inputs.get(spec.name) if spec.role is OutputRole.NEW_VALUE else None
            if target is not None and target not in shown and node in self.place:
                found[node].append((target, max(self.readers[target], default=-1)))
        return found

    def kinds(self, fewest: int) -> list[_Kind]:
        """Layers that occur at least so often."""
        numbers: dict[Hashable, int] = {}
        tokens = [numbers.setdefault(self._token(node), len(numbers)) for node in self.ops]
        by_key: defaultdict[Hashable, list[_Occurrence]] = defaultdict(list)
        for repeat in find_repeats(tokens, fewest):
            for occurrence in self._aligned([self._occurrence(*ends) for ends in self._stretches(repeat)]):
                by_key[occurrence.key].append(occurrence)
        long = [alike for alike in by_key.values() if len(alike) > 1 and len(alike[0].ops) >= _FEWEST_OPS // 2]
        saved = sum((len(alike) - 1) * len(alike[0].ops) for alike in long)
        return [self._kind(alike) for alike in long] if saved >= _FEWEST_SAVED else []

    def _token(self, node: fx.Node) -> Hashable:
        """The same for ops that may be alike; of an op that cannot be called from several places there is one only."""
        direction = _direction(node)
        if runs_of(node) or _is_result_of_call(node) or (direction is Direction.UPDATE and node not in self.moved):
            return node
        return node.target, _arguments(node, _layout), _layout(node)

    def _stretches(self, repeat: Repeat) -> list[tuple[int, int]]:
        """Cut a repeat at the seams across which the least memory is handed over, each time after some periods."""
        periods = repeat.length // repeat.period
        least = max(min(-(-_FEWEST_OPS // repeat.period), periods // _FEWEST_CALLS), 1)
        most = max(min(2 * least, periods // _FEWEST_CALLS + 1), least + 1)
        together = min(range(least, most), key=lambda count: (periods % count, count))
        step = together * repeat.period
        prices = self._prices(repeat)
        most = repeat.length // step

        def price(start: int) -> tuple[float, int, int]:
            count = (repeat.end - start) // step
            seams = [prices[start + index * step - repeat.start] for index in range(count + 1)]
            return sum(seams) / len(seams), -count, start

        starts = [
            start for start in range(repeat.start, repeat.start + step) if repeat.end - start >= step * (most - 1)
        ]
        average, count, start = min(map(price, starts))
        if average >= _NEVER / (most + 1):
            return []
        return [(start + index * step, start + (index + 1) * step) for index in range(-count)]

    def _prices(self, repeat: Repeat) -> list[int]:
        """For each place of a repeat, and that after it: how many bytes go from before it to what comes after it."""
        changes = [0] * (repeat.length + 2)
        for place in range(repeat.start, repeat.end):
            node = self.ops[place]
            value, readers = value_of(node), self.readers[node]
            is_tensor = isinstance(value, torch.Tensor)
            last = max((reader for reader in readers if reader < repeat.end or not is_tensor), default=place)
            if last > place:
                nbytes = value.nbytes + 1 if is_tensor else _NEVER
                changes[place + 1 - repeat.start] += nbytes
                changes[min(last, repeat.end) + 1 - repeat.start] -= nbytes
        for index in range(1, len(changes)):
            changes[index] += changes[index - 1]
        return changes

    def _aligned(self, occurrences: Sequence[_Occurrence]) -> list[_Occurrence]:
        """Let those that differ from most in how they see what they take be like these, as the first layer often is."""
        if not occurrences:
            return []
        counts = Counter(occurrence.key for occurrence in occurrences)
        usual = max(occurrences, key=lambda occurrence: counts[occurrence.key])
        return [self._like(usual, occurrence) for occurrence in occurrences]

    def _like(self, usual: _Occurrence, given: _Occurrence) -> _Occurrence:
        """The same stretch with some views made outside of it, if it is like the usual one then."""
        taken: set[fx.Node] = set()
        found = given
        while found.key != usual.key:
            pairs = zip(found.operands, usual.operands, strict=False)
            other = next((node for node, wanted in pairs if _layout(node) != _layout(wanted)), None)
            users = [node for node in found.ops if other in node.all_input_nodes]
            if len(users) != 1 or not shows_other(users[0]):
                return given
            taken.add(users[0])
            found = self._occurrence(given.start, given.end, taken)
        return found

    def _occurrence(self, start: int, end: int, taken: Collection[fx.Node] = ()) -> _Occurrence:
        """The ops from start to end; `taken` are views of what they take that are made outside."""
        inside = self.ops[start:end]
        ops, outside = with_views(inside, set(inside), taken)
        written = [(target, node) for node in inside for target, last in self._writable.get(node, ()) if last < end]
        targets = [target for target, _ in written]
        operands = [*targets, *(node for node in outside if node not in targets)]
        numbers = {node: index for index, node in enumerate((*operands, *ops))}
        new = tuple(numbers[value] for _, value in written)
        wiring = [(node.target, _arguments(node, numbers.__getitem__), _layout(node)) for node in ops]
        key = (new, tuple(map(_layout, operands)), tuple(wiring))
        return _Occurrence(start, end, tuple(ops), tuple(operands), tuple(written), key)

    def _kind(self, alike: Sequence[_Occurrence]) -> _Kind:
        given: set[int] = set()
        for occurrence in alike:
            new = {value for _, value in occurrence.written}
            for index, node in enumerate(occurrence.ops):
                place = self.place.get(node)
                if place is None or not occurrence.start <= place < occurrence.end:
                    continue  # a view
                is_read = any(reader >= occurrence.end for reader in self.readers[node])
                if is_read or (node in self._results and (node not in new or self._is_returned(node, occurrence))):
                    given.add(index)
        return _Kind(tuple(alike), tuple(sorted(given)))

    def _is_returned(self, node: fx.Node, occurrence: _Occurrence) -> bool:
        """Whether a new value that a stretch writes is a result of the graph beside that."""
        return sum(value is node for _, value in occurrence.written) < sum(n is node for _, n in self.graph.outputs)

    def outlined(self, kinds: Sequence[_Kind]) -> StepGraph:
        builder = GraphBuilder()
        builder.inputs(self.graph.inputs)
        calls = {
            occurrence.start: (occurrence, kind, graph)
            for index, kind in enumerate(kinds)
            for graph in [kind.graph(f"layer{index}")]
            for occurrence in kind.occurrences
        }
        new_values: dict[str, fx.Node] = {}
        names = {node: spec.name for spec, node in self.graph.inputs}
        place = 0
        while place < len(self.ops):
            if place not in calls:
                ops, _ = with_views([self.ops[place]], builder.copies.keys())
                builder.copy(ops)
                place += 1
                continue
            occurrence, kind, graph = calls[place]
            seen, _ = with_views([n for n in occurrence.operands if n not in builder.copies], builder.copies.keys())
            builder.copy(seen)
            results = builder.call_graph(_note(occurrence), graph, [builder.copies[n] for n in occurrence.operands])
            for index, result in zip(kind.given, results, strict=False):
                builder.copies[occurrence.ops[index]] = result
            for (target, _), result in zip(occurrence.written, results[len(kind.given) :], strict=True):
                new_values[names[target]] = result
            place = occurrence.end
        return self._finished(builder, new_values)

    def _finished(self, builder: GraphBuilder, new_values: dict[str, fx.Node]) -> StepGraph:
        given = self.graph
        for spec, node in given.outputs:
            is_written = spec.role is OutputRole.NEW_VALUE and spec.name in new_values
            builder.output(spec, new_values[spec.name] if is_written else builder.copies[node])
        outlined = builder.build(given.name, guards=given.guards, constants=given.constants, graphs=given.graphs)
        kept = {name: inner for name, inner in given.graphs.items() if name not in outlined.graphs}
        return replace(outlined, graphs={**kept, **outlined.graphs})


def _direction(node: fx.Node) -> Direction | None:
    note = note_of(node)
    return None if note is None else note.direction


def _note(occurrence: _Occurrence) -> Note:
    return note_of(occurrence.ops[0]) or Note(Direction.FORWARD)


def _arguments(node: fx.Node, show: Callable[[fx.Node], Any]) -> str:
    """The arguments of an op, with something in place of nodes."""
    return repr(fx.map_arg((node.args, node.kwargs), show))


def _layout(node: fx.Node) -> Hashable:
    """Type, size and memory layout of what a node computes."""
    return _hashable(value_of(node))


def _hashable(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), tuple(value.stride())
    if isinstance(value, (tuple, list)):
        return tuple(map(_hashable, cast("list[Any]", value)))
    return repr(value)
