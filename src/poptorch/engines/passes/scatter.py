"""Update a table of which only the rows that were looked up have a gradient.

Autograd makes the gradient of an embedding a table of its own, zeros almost everywhere. An update that is linear in the
gradient, like that of SGD with momentum, can do without: new values are computed as if the gradient were zero, and what
the rows contribute is added to them afterwards. For a large table that saves a third of the memory traffic, and nearly
all of it where gradients are only accumulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from poptorch.engines.host import Host
from poptorch.ir import OutputRole, StepGraph, insert, value_of

aten = torch.ops.aten
_GRADIENT = aten.embedding_dense_backward.default
_NO_PADDING = -1


@dataclass(frozen=True)
class _Split:
    """A value in two parts: one for all rows, and one that is added to those that were looked up; None is zero."""

    dense: fx.Node | None
    rows: fx.Node | None


def scatter_row_gradients(graph: StepGraph, host: Host) -> StepGraph:
    """Add gradients of embeddings to the rows they belong to, where the update allows it."""
    if not any(node.target is _GRADIENT and _is_plain(node) for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    found = [node for node in ops.nodes if node.target is _GRADIENT and _is_plain(node)]
    changed = [_Scatter(ops, node).run(graph) for node in found]
    if not any(changed):
        return graph
    ops.eliminate_dead_code()
    return replace(graph, ops=ops)


class _Scatter:
    """Follows one gradient through the update, part by part."""

    def __init__(self, ops: fx.Graph, gradient: fx.Node) -> None:
        self.ops, self.gradient = ops, gradient
        self.indices: Any = gradient.args[1]
        self.splits: dict[fx.Node, _Split] = {}

    def run(self, graph: StepGraph) -> bool:
        """Whether all new values could be computed without the gradient as a whole."""
        output = self.ops.output_node()
        nodes = [node for node in self.ops.nodes if node.op == "call_function"]
        with self.ops.inserting_before(self.gradient):
            self.splits[self.gradient] = _Split(None, self._rows())
        for node in nodes:
            if any(used in self.splits for used in node.all_input_nodes):
                with self.ops.inserting_before(node):
                    split = self._parts(node)
                if split is None:
                    return False
                self.splits[node] = split
        results: list[Any] = list(output.args[0])  # pyright: ignore
        for position, spec in enumerate(graph.signature.outputs):
            split = self.splits.get(results[position])
            if split is not None:
                if split.dense is None or spec.role is not OutputRole.NEW_VALUE:
                    return False
                with self.ops.inserting_before(output):
                    put = (aten.index_put.default, split.dense, [self.indices], split.rows, True)
                    results[position] = self._call(*put, note=self.gradient, like=split.dense)
        output.args = (tuple(results),)
        return True

    def _call(self, target: Any, *args: Any, note: fx.Node, like: fx.Node) -> fx.Node:
        """A new op that belongs where `note` does and gives a value like that of another node."""
        node = self.ops.call_function(target, args)
        node.meta = {"val": value_of(like), "custom": note.meta.get("custom", {})}
        return node

    def _rows(self) -> fx.Node:
        """The gradients of the rows, one for each time that a row was looked up; padding has none."""
        rows: Any = self.gradient.args[0]
        padding: Any = self.gradient.args[3]
        if padding == _NO_PADDING:
            return rows
        is_padding = insert(self.ops, self.gradient, aten.eq.Scalar, self.indices, padding)
        is_padding = insert(self.ops, self.gradient, aten.unsqueeze.default, is_padding, -1)
        return insert(self.ops, self.gradient, aten.masked_fill.Scalar, rows, is_padding, 0.0)

    def _parts(self, node: fx.Node) -> _Split | None:
        """The parts of a sum, a difference or a multiple of values that have parts; None for any other op."""
        if len(node.args) != 2 or node.kwargs:
            return None
        first: Any = node.args[0]
        second: Any = node.args[1]
        if node.target is aten.mul.Tensor:
            split, factor = (self.splits[first], second) if first in self.splits else (self.splits[second], first)
            if factor in self.splits or not _is_number(factor):
                return None
            dense, rows = split.dense, split.rows
            return _Split(
                None if dense is None else self._call(node.target, dense, factor, note=node, like=node),
                None if rows is None else self._call(node.target, rows, factor, note=self.gradient, like=rows),
            )
        if node.target not in (aten.add.Tensor, aten.sub.Tensor):
            return None
        if any(not isinstance(arg, fx.Node) or value_of(arg).shape != value_of(node).shape for arg in (first, second)):
            return None
        left, right = self.splits.get(first, _Split(first, None)), self.splits.get(second, _Split(second, None))
        return _Split(
            self._combined(node.target, left.dense, right.dense, note=node),
            self._combined(node.target, left.rows, right.rows, note=self.gradient),
        )

    def _combined(self, target: Any, left: fx.Node | None, right: fx.Node | None, note: fx.Node) -> fx.Node | None:
        """The sum or difference of two parts, of which one or both may be zero."""
        if right is None:
            return left
        if left is None:
            is_sum = target is aten.add.Tensor
            return right if is_sum else self._call(aten.neg.default, right, note=note, like=right)
        return self._call(target, left, right, note=note, like=left)


def _is_number(factor: Any) -> bool:
    return not isinstance(factor, fx.Node) or value_of(factor).dim() == 0


def _is_plain(gradient: fx.Node) -> bool:
    """Whether a gradient is float32, so that the order of additions hardly matters, and not scaled by frequencies."""
    return value_of(gradient).dtype is torch.float32 and not gradient.args[4]
