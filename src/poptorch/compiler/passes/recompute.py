"""Compute activations a second time for the backward pass, instead of keeping them.

In:    a training StepGraph, and options that ask for recomputation, or values that the user marks as stored.
Out:   the same graph in which the backward pass reads copies of forward ops, made just before it needs them. The
       forward pass is cut into segments: at the values that the user stores or, if there are none, into as many as
       each has ops. What crosses from one segment to the next is kept, and so is what is random; the rest is
       recomputed.
Keeps: every value, the signature. Ops that have an effect, or that the backward pass shares with outputs, stay single.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.ir import Direction, StepGraph, annotation, hint_of, note_of, value_of
from poptorch.ir.ops import has_effect, is_random, memory_owner
from poptorch.options import Settings

_STORED = "checkpoint"  # the hint that a value is kept


def recompute_activations(graph: StepGraph, settings: Settings) -> StepGraph:
    """Let the backward pass compute what it needs of the forward pass again."""
    if not settings.is_training or not _is_asked_for(graph, settings):
        return graph
    ops = graph.copy_ops()
    forward = [node for node in ops.nodes if _direction(node) is Direction.FORWARD]
    segments = _segments(forward)
    kept = _kept(forward, segments)
    for number in reversed(range(1 + max(segments.values(), default=0))):
        _recompute([node for node in forward if segments[node] == number], kept, ops)
    return replace(graph, ops=ops)


def _is_asked_for(graph: StepGraph, settings: Settings) -> bool:
    """Whether the whole step recomputes; stages that run by themselves see to it when they are cut."""
    if settings.placement.runs_stages:
        return False
    chosen = settings.training.recomputation
    return any(hint_of(node, _STORED) for node in graph.ops.nodes) if chosen is None else chosen > 0


def _direction(node: fx.Node) -> Direction | None:
    note = note_of(node)
    return None if note is None or node.op != "call_function" else note.direction


def _segments(forward: list[fx.Node]) -> dict[fx.Node, int]:
    """The segment of each forward op: a stored value ends one."""
    marks = {node for node in forward if hint_of(node, _STORED)}
    if not marks:
        length = max(1, math.isqrt(len(forward)))
        return {node: index // length for index, node in enumerate(forward)}
    found: dict[fx.Node, int] = {}
    number = 0
    for node in forward:
        found[node] = number
        number += node in marks
    return found


def _kept(forward: list[fx.Node], segments: dict[fx.Node, int]) -> set[fx.Node]:
    """The forward values that are not recomputed: later segments or the caller take them, or they cannot be."""

    def leaves(node: fx.Node) -> bool:
        is_result = any(user.op == "output" for user in node.users)
        return is_result or any(segments.get(user, segments[node]) != segments[node] for user in node.users)

    kept = {node for node in forward if leaves(node) or is_random(node) or has_effect(node)}
    for node in forward:  # items of a kept tuple, and views of kept memory, cost nothing
        if node.target is operator.getitem and node.args[0] in kept:
            kept.add(node)
    return kept


def _recompute(segment: list[fx.Node], kept: set[fx.Node], ops: fx.Graph) -> None:
    """Give backward ops copies of what they read of a segment, made before the first of them."""
    wanted = [node for node in segment if node not in kept and _backward_users(node)]
    again = set(wanted)
    for node in reversed(segment):
        if node in again:
            again.update(used for used in node.all_input_nodes if used in segment and used not in kept)
    copied = [node for node in segment if node in again]
    if not any(_costs_memory(node) for node in wanted):
        return
    order = {node: index for index, node in enumerate(ops.nodes)}
    first = min((user for node in copied for user in _backward_users(node)), key=order.__getitem__)
    copies: dict[fx.Node, fx.Node] = {}
    with ops.inserting_before(first):
        for node in copied:
            copies[node] = ops.node_copy(node, lambda used: copies.get(used, used))
            note: Any = note_of(node)
            custom = {**node.meta["custom"], **annotation(replace(note, direction=Direction.BACKWARD))}
            copies[node].meta = {**node.meta, "custom": custom}
    for node, copy in copies.items():
        for user in _backward_users(node):
            if user not in copies.values():
                user.replace_input_with(node, copy)


def _backward_users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if _direction(user) is Direction.BACKWARD]


def _costs_memory(node: fx.Node) -> bool:
    """Whether keeping a value takes memory that is not there anyway."""
    return memory_owner(node).op != "placeholder" and isinstance(value_of(node), torch.Tensor)
