"""Find the user's integers that a graph uses as indices, and the range they must be in.

Native code stops the whole process at an index out of range, so such inputs are checked before a call runs. An index
that depends on weights or random numbers cannot be checked early; PyTorch's own check in the program remains for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from poptorch.executable import IndexCheck
from poptorch.ir import Role, StepGraph, note_of, value_of
from poptorch.ir.ops import ancestors, is_random

aten = torch.ops.aten
_LONGEST_COMPUTATION = 32  # ops between the inputs and an index that are worth running a second time

_KEEPS_ELEMENTS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.clone.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.expand.default,
        aten._to_copy.default,
    }
)

_ROWS = frozenset({aten.embedding.default, aten._embedding_bag.default, aten._embedding_bag_forward_only.default})
_LOSSES = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
_LISTS = frozenset({aten.index.Tensor, aten.index_put.default, aten._unsafe_index.Tensor})
_ALONG_DIMENSION = frozenset(
    {
        aten.gather.default,
        aten.index_select.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter.reduce,
        aten.scatter.value_reduce,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
        aten.index_add.default,
        aten.index_copy.default,
        aten.index_fill.int_Scalar,
        aten.index_fill.int_Tensor,
    }
)


def index_checks(graph: StepGraph) -> tuple[IndexCheck, ...]:
    """One check per integer input (or per short computation on inputs) that indexes something."""
    state = {
        n for s, n in zip(graph.signature.inputs, graph.placeholders, strict=True) if s.role is not Role.USER_INPUT
    }
    inputs = [n for s, n in zip(graph.signature.inputs, graph.placeholders, strict=True) if s.role is Role.USER_INPUT]
    checks: dict[Any, IndexCheck] = {}
    for node in graph.ops.nodes:
        for index, size, wraps, ignored in _indices(node):
            source = _same_elements(index)
            ops = None
            if source not in inputs:
                ops = _computation(graph, index, state)
                if ops is None:
                    continue
                source = next((n for n in inputs if n in ancestors([index])), None)
            if source is None or value_of(index).dtype.is_floating_point:
                continue
            key = (source if ops is None else index, size, wraps, ignored)
            position = inputs.index(source)
            note = note_of(node)
            checks.setdefault(
                key,
                IndexCheck(
                    name=graph.signature.user_inputs[position].name,
                    position=position,
                    ops=ops,
                    size=size,
                    wraps=wraps,
                    ignored=ignored,
                    op=node.target.name().split("::")[-1].split(".")[0],
                    line=None if note is None else note.line,
                ),
            )
    return tuple(checks.values())


def _indices(node: fx.Node) -> Iterator[tuple[fx.Node, int, bool, int | None]]:
    """The index nodes of an op, with the size they index, whether negative values wrap, and an ignored value."""
    target: Any = node.target
    if target in _ROWS:
        yield node.args[1], value_of(node.args[0]).shape[0], False, None  # pyright: ignore
    elif target in _ALONG_DIMENSION:
        shape = value_of(node.args[0]).shape  # pyright: ignore
        yield node.args[2], shape[node.args[1]] if shape else 1, False, None  # pyright: ignore
    elif target in _LOSSES:
        shape = value_of(node.args[0]).shape  # pyright: ignore
        yield node.args[1], shape[1] if len(shape) > 1 else shape[0], False, node.args[4]  # pyright: ignore
    elif target in _LISTS:
        shape = value_of(node.args[0]).shape  # pyright: ignore
        entries: list[Any] = list(node.args[1])  # pyright: ignore
        if any(entry is not None and value_of(entry).dtype in (torch.bool, torch.uint8) for entry in entries):
            return
        for dimension, entry in enumerate(entries):
            if entry is not None:
                yield entry, shape[dimension], True, None


def _same_elements(node: fx.Node) -> fx.Node:
    """The node that holds the same integers, looking through ops that neither drop nor change any."""
    while node.target in _KEEPS_ELEMENTS and not value_of(node).dtype.is_floating_point:
        node = node.all_input_nodes[0]
    return node


def _computation(graph: StepGraph, index: fx.Node, state: set[fx.Node]) -> fx.GraphModule | None:
    """A graph from the user's inputs to one index, if it is short and needs nothing else."""
    needed = ancestors([index])
    if len(needed) > _LONGEST_COMPUTATION or needed & state or any(map(is_random, needed)):
        return None
    ops = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.ops.nodes:
        if (node.op == "placeholder" and node not in state) or (node.op == "call_function" and node in needed):
            copies[node] = ops.node_copy(node, lambda n: copies[n])
    ops.output(copies[index])
    return fx.GraphModule(nn.Module(), ops)
