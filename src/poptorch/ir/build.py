"""Put graphs together. Every graph of ours is made by a `GraphBuilder`, and so all of them keep the same rules:

state comes before the user's inputs, every input and output has its spec, every op a note and a value, and nothing is
kept that neither reaches an output nor has an effect.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from poptorch.ir.control import call_graph, called_graphs
from poptorch.ir.graph import Guard, Note, StepGraph, annotation, copy_node
from poptorch.ir.inline import inline_as
from poptorch.ir.signature import InputSpec, OutputRole, OutputSpec, Role, Signature
from poptorch.ir.values import describe_once, update_value, value_of

aten = torch.ops.aten


class GraphBuilder:
    """A graph in the making. `copies` leads from nodes of other graphs to the nodes that stand for them here."""

    def __init__(self) -> None:
        self._ops = fx.Graph()
        self._state: list[tuple[InputSpec, fx.Node]] = []
        self._user: list[tuple[InputSpec, fx.Node]] = []
        self._results: list[tuple[OutputSpec, fx.Node]] = []
        self._graphs: dict[str, StepGraph] = {}
        self._alike: Counter[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = Counter()  # inputs by layout
        self.copies: dict[fx.Node, fx.Node] = {}

    def input(self, spec: InputSpec, stands_for: fx.Node | None = None) -> fx.Node:
        """A new input; `stands_for` is what it is in the graph that ops are copied from."""
        is_state = spec.role.is_state
        before = self._user[0][1] if is_state and self._user else self._first_op()
        name = f"in{len(self._state) + len(self._user)}"
        if before is None:
            node = self._ops.placeholder(name)
        else:
            with self._ops.inserting_before(before):
                node = self._ops.placeholder(name)
        layout = spec.shape, spec.stride, spec.dtype
        node.meta = {"val": describe_once(*layout, self._alike[layout])}
        self._alike[layout] += 1
        (self._state if is_state else self._user).append((spec, node))
        if stands_for is not None:
            self.copies[stands_for] = node
        return node

    def _first_op(self) -> fx.Node | None:
        """The op that comes first so far: inputs stand before it."""
        last = (self._user or self._state)[-1:]
        first = last[0][1].next if last else next(iter(self._ops.nodes), None)
        return None if first is None or first.op == "root" else first

    def inputs(self, pairs: Iterable[tuple[InputSpec, fx.Node]]) -> None:
        """An input for each of these inputs of another graph."""
        for spec, node in pairs:
            self.input(spec, node)

    def node(self, name: str) -> fx.Node | None:
        """The input of this name, if there is one."""
        return next((node for spec, node in (*self._state, *self._user) if spec.name == name), None)

    def copy(self, nodes: Iterable[fx.Node]) -> None:
        """The same ops as in another graph, with the values that stand for their operands here."""
        for node in nodes:
            if node.op == "call_function":
                self.copies[node] = copy_node(self._ops, node, self.copies)

    def call(self, note: Note, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A new op."""
        node = self._ops.call_function(target, args, kwargs)
        node.meta = {"custom": annotation(note)}
        update_value(node)
        return node

    def call_as(self, note: Note, value: Any, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A new op that cannot tell what it computes: `value` does."""
        node = self._ops.call_function(target, args, kwargs)
        node.meta = {"custom": annotation(note), "val": value}
        return node

    def inline(self, note: Note, function: Callable[..., Any], *args: Any) -> Any:
        """The ops of a Python function of tensors, which nodes take the place of; nested as what the function gives."""
        return inline_as(self._ops, annotation(note), function, *args)

    def call_graph(self, note: Note, graph: StepGraph, operands: Sequence[fx.Node]) -> list[fx.Node]:
        """A run of another graph on values of this one; gives a node for each of its outputs."""
        node = self._ops.call_function(call_graph, (graph.name, list(operands)))
        given = {spec.name: value_of(operand) for spec, operand in zip(graph.signature.inputs, operands, strict=True)}
        values = tuple(  # what is written is like what was given, which may be of any length
            given[spec.name] if spec.role is OutputRole.NEW_VALUE else value_of(result)
            for spec, result in graph.outputs
        )
        node.meta = {"custom": annotation(note), "val": values}
        self._graphs[graph.name] = graph
        return [self.call(note, operator.getitem, node, index) for index in range(len(graph.results))]

    def cast(self, note: Note, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The same value in another type."""
        return node if value_of(node).dtype == dtype else self.call(note, aten._to_copy.default, node, dtype=dtype)

    def output(self, spec: OutputSpec, node: fx.Node) -> None:
        """One more result."""
        self._results.append((spec, node))

    def build(
        self,
        name: str,
        *,
        guards: Sequence[Guard] = (),
        constants: Mapping[str, torch.Tensor] | None = None,
        graphs: Mapping[str, StepGraph] | None = None,
    ) -> StepGraph:
        """The finished graph, with those of the constants that are inputs, and those of the graphs that are called."""
        self._ops.output(tuple(node for _, node in self._results))
        self._ops.eliminate_dead_code()
        inputs = tuple(spec for spec, _ in (*self._state, *self._user))
        signature = Signature(inputs, tuple(spec for spec, _ in self._results))
        known, called = {**(graphs or {}), **self._graphs}, called_graphs(self._ops)
        used = {spec.name for spec in inputs if spec.role is Role.CONSTANT}
        return StepGraph(
            name,
            self._ops,
            signature,
            tuple(guards),
            {key: value for key, value in (constants or {}).items() if key in used},
            {key: graph for key, graph in known.items() if key in called},
        )
