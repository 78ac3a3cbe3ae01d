"""Cut the update of many parameters into one part that they share and one piece each, and find pieces that are alike.

In:    a StepGraph.
Out:   the same graph in which the update of each parameter is a call of a graph that belongs to this one. Parameters
       with the same arithmetic share that graph. Where each element is computed from the elements at the same place
       alone, it takes vectors of any length.
Keeps: every value, the signature.

The arithmetic of an update is the same for all parameters of an optimiser. Generated code that repeats it for hundreds
of them takes minutes to compile; code for one piece takes seconds and can be called for each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from poptorch.engines.host import Host
from poptorch.engines.passes.draw_ahead import calls_python
from poptorch.ir import (
    Direction,
    GraphBuilder,
    InputSpec,
    Note,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    is_update,
    update_value,
    value_of,
)
from poptorch.ir.ops import ancestors, as_op, is_random

aten = torch.ops.aten
_FEWEST_PIECES = 16  # below this one program for all of them compiles fast enough, and needs one call
_MANY_ELEMENTS = 2**13  # from here on the code for a piece may use several threads
_ELEMENTWISE = frozenset({aten._to_copy.default, aten.zeros_like.default, aten.clone.default})
_KEEPS_LAYOUT: tuple[dict[str, object], ...] = ({}, {"memory_format": torch.preserve_format})
_NOTE = Note(Direction.UPDATE)


def outline_updates(graph: StepGraph, host: Host) -> StepGraph:
    """Let many parameters be updated by calls of a few graphs."""
    if calls_python(graph):  # which may end a run in the middle, so nothing may be written on the way
        return graph
    cut = _Cut(graph)
    return cut.outlined() if len(cut.parameters) >= _FEWEST_PIECES and cut.is_possible else graph


@dataclass(frozen=True)
class _Piece:
    """The update of one parameter, by names that are the same whatever the parameter."""

    ops: tuple[fx.Node, ...]
    inputs: Mapping[fx.Node, InputSpec]  # what it takes
    results: Mapping[str, fx.Node]  # the new values of inputs
    written: tuple[str, ...]  # the inputs of the whole that get these
    order: tuple[int, ...] | None  # of dimensions in memory, if it takes vectors; None: it takes tensors as they are

    @property
    def key(self) -> str:
        """The same for two pieces if the graph of one can stand for that of the other."""
        is_flat = self.order is not None
        length = max(math.prod(spec.shape) for spec in self.inputs.values())
        size = "many" if length >= _MANY_ELEMENTS else "few"
        inputs = [(spec.dtype, size) if is_flat and spec.shape else spec for spec in self.inputs.values()]
        numbers = {node: index for index, node in enumerate((*self.inputs, *self.ops))}
        ops = [(str(n.target), fx.map_arg((n.args, n.kwargs), numbers.__getitem__)) for n in self.ops]  # pyright: ignore
        return repr((is_flat, inputs, ops, [(name, numbers[node]) for name, node in self.results.items()]))

    def graph(self, name: str) -> StepGraph:
        """The graph for all that have the same key."""
        builder = GraphBuilder()
        for node, spec in self.inputs.items():
            builder.input(spec, node)
        builder.copy(self.ops)
        for written, node in self.results.items():
            builder.output(OutputSpec(written, OutputRole.NEW_VALUE), builder.copies[node])
        graph = replace(builder.build(name), takes_any_length=self.order is not None)
        if graph.takes_any_length:
            for node in graph.ops.nodes:  # they compute vectors now
                if node.op == "call_function":
                    update_value(node)
        return graph


class _Cut:
    """Which ops of an update belong to which parameter. What is computed from several of them is shared by all."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph, signature = graph, graph.signature
        self.specs = {node: spec for spec, node in graph.inputs}
        self.returned = [(spec, node) for spec, node in graph.outputs if spec.role is not OutputRole.NEW_VALUE]
        self.results = {spec.name: node for spec, node in graph.outputs if spec.role is OutputRole.NEW_VALUE}
        updated = {name for name, node in self.results.items() if is_update(node)}
        self.parameters = {s.name: s for s in signature.inputs if s.role is Role.PARAMETER and s.name in updated}
        self.owner = {node: s.owner if s.owner in self.parameters else None for node, s in self.specs.items()}
        self.ops = [node for node in graph.ops.nodes if node.op == "call_function"]
        for node in self.ops:
            owners = {self.owner[used] for used in node.all_input_nodes} - {None}
            self.owner[node] = owners.pop() if is_update(node) and len(owners) == 1 else None
        for node in reversed(self.ops):
            if is_update(node) and not self.owner[node]:
                self.owner[node] = self._only_user(node)
        self.by_name = {spec.name: spec for spec in signature.inputs}
        self.ops_of: defaultdict[str | None, list[fx.Node]] = defaultdict(list)
        for node in self.ops:
            self.ops_of[self.owner[node]].append(node)
        self.inputs_of: defaultdict[str | None, dict[fx.Node, InputSpec]] = defaultdict(dict)
        for node, spec in self.specs.items():
            self.inputs_of[self.owner[node]][node] = spec
        self.owned_results = {n: node for n, node in self.results.items() if self._owner_of(n) in self.parameters}

    def _owner_of(self, name: str) -> str:
        """The parameter that an input belongs to."""
        return self.by_name[name].owner

    def _only_user(self, node: fx.Node) -> str | None:
        """The parameter that alone needs this op: it takes a gradient a step further, but nothing of the parameter."""
        owners = {self.owner.get(user) for user in node.users}  # None for one that is returned
        owner = owners.pop() if len(owners) == 1 else None
        if owner is None or not (shape := self.parameters[owner].shape):
            return None
        return owner if getattr(value_of(node), "shape", None) == shape else None

    @property
    def is_possible(self) -> bool:
        """Whether pieces write only what is theirs, and read nothing that the shared part overwrites or is given."""
        if any(self.owner[node] != self._owner_of(name) for name, node in self.owned_results.items()):
            return False
        if any(self.owner[node] for _, node in self.returned) or any(is_random(node) for node in self._owned_ops()):
            return False
        foreign = {
            node
            for node, spec in self.specs.items()
            if not spec.role.is_state or (spec.name in self.results and not self.owner[node])
        }
        crossing = [used for node in self._owned_ops() for used in node.all_input_nodes if not self.owner[used]]
        return all(isinstance(value_of(n), torch.Tensor) for n in crossing) and foreign.isdisjoint(crossing)

    def outlined(self) -> StepGraph:
        builder = GraphBuilder()
        builder.inputs(self.graph.inputs)
        pieces = [self._piece(owner) for owner in self.parameters]
        shared = {name: node for name, node in self.results.items() if name not in self.owned_results}
        operands = [operand for piece in pieces for operand in piece.inputs]
        needed = ancestors([*shared.values(), *(node for _, node in self.returned), *operands])
        builder.copy(node for node in self.ops if node in needed)
        graphs: dict[str, StepGraph] = {}
        new_values = {name: builder.copies[node] for name, node in shared.items()}
        for piece in pieces:
            key = piece.key
            if key not in graphs:
                graphs[key] = piece.graph(f"piece{len(graphs)}")
            operands = [self._operand(builder, node, piece) for node in piece.inputs]
            results = builder.call_graph(_NOTE, graphs[key], operands)
            for name, result in zip(piece.written, results, strict=True):
                new_values[name] = self._whole(builder, result, name, piece)
        for spec, node in self.graph.outputs:
            builder.output(spec, new_values[spec.name] if spec.role is OutputRole.NEW_VALUE else builder.copies[node])
        given = self.graph
        outlined = builder.build(given.name, guards=given.guards, constants=given.constants, graphs=given.graphs)
        kept = {name: inner for name, inner in given.graphs.items() if name not in outlined.graphs}
        return replace(outlined, graphs={**kept, **outlined.graphs})

    def _operand(self, builder: GraphBuilder, node: fx.Node, piece: _Piece) -> fx.Node:
        """What a piece is passed: as it is, or as a vector in the order of memory."""
        operand = builder.copies[node]
        if piece.order is None or value_of(operand).dim() == 0:
            return operand
        if piece.order != tuple(range(len(piece.order))):
            operand = builder.call(_NOTE, aten.permute.default, operand, list(piece.order))
        return operand if value_of(operand).dim() == 1 else builder.call(_NOTE, aten.reshape.default, operand, [-1])

    def _whole(self, builder: GraphBuilder, result: fx.Node, name: str, piece: _Piece) -> fx.Node:
        """What a piece gives, in the shape of the input that it goes to."""
        shape = self.by_name[name].shape
        if piece.order is None or len(shape) < 2:
            return result
        in_order = builder.call(_NOTE, aten.view.default, result, [shape[dim] for dim in piece.order])
        back = [piece.order.index(dim) for dim in range(len(shape))]
        return (
            in_order if back == list(range(len(shape))) else builder.call(_NOTE, aten.permute.default, in_order, back)
        )

    def _owned_ops(self) -> list[fx.Node]:
        return [node for node in self.ops if self.owner[node]]

    def _piece(self, owner: str) -> _Piece:
        ops, own = self.ops_of[owner], dict(self.inputs_of[owner])
        inside = set(ops)
        outside = dict.fromkeys(used for node in ops for used in node.all_input_nodes if used not in inside)
        shape, stride = self.parameters[owner].shape, self.parameters[owner].stride
        for node in outside:  # gradients come in the layout of their parameter
            if node not in own and value_of(node).shape == shape and shape and node.op != "placeholder":
                own[node] = InputSpec("", Role.ACCUMULATOR, shape, value_of(node).dtype, stride)
        specs = {node: replace(spec, name=f"own:{i}", owner="", key="") for i, (node, spec) in enumerate(own.items())}
        order = _flat_order(ops, list(specs.values()), [value_of(n) for n in outside if n not in specs])
        inputs = {node: _flattened(spec) if order is not None else spec for node, spec in specs.items()}
        for node in outside:
            if node not in specs:
                inputs[node] = InputSpec.of(f"shared:{len(inputs)}", Role.HYPER, value_of(node))
        names = {spec.name: specs[node].name for node, spec in own.items()}
        written = [name for name in names if name in self.owned_results]
        results = {names[name]: self.owned_results[name] for name in written}
        return _Piece(tuple(ops), inputs, results, tuple(written), order)


def _flat_order(
    ops: Sequence[fx.Node], own: Sequence[InputSpec], shared: Sequence[torch.Tensor]
) -> tuple[int, ...] | None:
    """The order of dimensions in memory if all tensors have it, have no gaps, and are computed element by element."""
    layouts = {(spec.shape, spec.stride) for spec in own if spec.shape}
    if len(layouts) != 1 or any(tensor.dim() for tensor in shared) or not all(map(_is_elementwise, ops)):
        return None
    shape, stride = layouts.pop()
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim)))
    sizes = [shape[dim] for dim in order]
    is_dense = all(stride[dim] == math.prod(sizes[place + 1 :]) for place, dim in enumerate(order) if shape[dim] > 1)
    return order if is_dense and math.prod(shape) > 0 else None


def _is_elementwise(node: fx.Node) -> bool:
    if node.target in _ELEMENTWISE:
        return {name: value for name, value in node.kwargs.items() if name != "dtype"} in _KEEPS_LAYOUT
    op = as_op(node.target)
    return op is not None and torch.Tag.pointwise in op.tags


def _flattened(spec: InputSpec) -> InputSpec:
    return replace(spec, shape=(math.prod(spec.shape),), stride=(1,)) if spec.shape else spec
