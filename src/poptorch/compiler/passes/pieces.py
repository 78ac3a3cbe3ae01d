"""Join the gradients of the pieces of a tensor.

In:    a training StepGraph.
Out:   the same graph in which a tensor that forward cut up completely, by indexing (`qkv[0]`, `qkv[1]`, `qkv[2]`) or by
       slicing (`x[:, :4]`, `x[:, 4:]`), gets the gradients of its pieces side by side. Autograd writes each into
       zeros of the whole tensor's size and adds those up.
Keeps: every value (where more than the pieces is added: up to rounding), the signature.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from poptorch.ir import StepGraph, insert, value_of
from poptorch.options import Settings

aten = torch.ops.aten
_ADD = aten.add.Tensor
_SELECTED, _SLICED = aten.select_backward.default, aten.slice_backward.default


@dataclass(frozen=True)
class _Piece:
    """The gradient of a part of a tensor, from `start` to `end` of one dimension."""

    dim: int
    start: int
    end: int
    spread: fx.Node  # the op that writes it into zeros


def join_pieces(graph: StepGraph, settings: Settings) -> StepGraph:
    """Concatenate what is spread out over zeros and added up."""
    if not settings.is_training or not any(node.target in (_SELECTED, _SLICED) for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if _adds(node) and not (_is_used_once(node) and _adds(next(iter(node.users)))):
            _join(ops, node)
    ops.eliminate_dead_code()
    return replace(graph, ops=ops)


def _adds(node: fx.Node) -> bool:
    return node.target is _ADD and not node.kwargs


def _is_used_once(node: fx.Node) -> bool:
    return len(node.users) == 1


def _join(graph: fx.Graph, total: fx.Node) -> None:
    summands = _summands(total)
    pieces = _tiling(summands)
    if not pieces:
        return
    spread = {piece.spread for piece in pieces}
    with graph.inserting_before(total):
        joined = _concatenate(graph, pieces)
        for summand in summands:
            if summand not in spread:
                joined = insert(graph, total, _ADD, joined, summand)
    total.replace_all_uses_with(joined)


def _summands(total: fx.Node) -> list[fx.Node]:
    """What a tree of additions adds up; nothing if it is not all of one shape and type."""
    expected = value_of(total)
    found: list[fx.Node] = []
    waiting: list[Any] = list(total.args)
    while waiting:
        node = waiting.pop(0)
        value = value_of(node) if isinstance(node, fx.Node) else None
        if value is None or value.shape != expected.shape or value.dtype != expected.dtype:
            return []
        if _adds(node) and _is_used_once(node):
            waiting = [*node.args, *waiting]
        else:
            found.append(node)
    return found


def _tiling(summands: list[fx.Node]) -> list[_Piece]:
    """Summands that together cover one dimension of the tensor, each part of it once."""
    groups: defaultdict[Any, list[_Piece]] = defaultdict(list)
    for node in summands:
        if _is_used_once(node) and (piece := _piece(node)) is not None:
            groups[node.target, piece.dim].append(piece)
    for pieces in groups.values():
        pieces.sort(key=lambda piece: piece.start)
        size = value_of(pieces[0].spread).shape[pieces[0].dim]
        if [piece.start for piece in pieces] + [size] == [0] + [piece.end for piece in pieces]:
            return pieces
    return []


def _piece(node: fx.Node) -> _Piece | None:
    arguments: Any = node.args
    if node.target is _SELECTED:
        _, sizes, dim, index = arguments
        start = index % sizes[dim]
        return _Piece(dim % len(sizes), start, start + 1, node)
    if node.target is _SLICED:
        _, sizes, dim, start, end, step = arguments
        start, end, _ = slice(start, end).indices(sizes[dim])
        return _Piece(dim % len(sizes), start, end, node) if step == 1 else None
    return None


def _concatenate(graph: fx.Graph, pieces: list[_Piece]) -> fx.Node:
    like, dim = pieces[0].spread, pieces[0].dim
    gradients: list[Any] = [piece.spread.args[0] for piece in pieces]
    if like.target is _SELECTED:
        gradients = [insert(graph, like, aten.unsqueeze.default, gradient, dim) for gradient in gradients]
    return insert(graph, like, aten.cat.default, gradients, dim)
