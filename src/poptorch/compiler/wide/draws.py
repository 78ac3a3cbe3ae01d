"""Random numbers for micro-batches side by side: exactly those that each would draw if they ran one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.compiler.wide.values import CannotWiden, Wide, Writer
from poptorch.ir import Direction, Note, note_of, value_of
from poptorch.ir.ops import as_op

aten = torch.ops.aten
_OF_SIZES = frozenset(
    {
        "bernoulli.p",
        "uniform",
        "normal_functional",
        "exponential",
        "geometric",
        "cauchy",
        "log_normal",
        "random",
        "random.to",
        "random.from",
        "rand_like",
        "randn_like",
        "randint_like",
        "randint_like.low_dtype",
    }
)  # ops that only look at the size of their first operand


def write_draws(writer: Writer, draws: Sequence[fx.Node], replicas: int) -> dict[fx.Node, Wide]:
    """Every draw for every micro-batch, in the order in which they would be made; wide values by the op they are of."""
    found: dict[fx.Node, list[fx.Node]] = {node: [] for node in draws}
    for index in range(writer.width):
        for node in draws:
            writer.note = replace(note_of(node) or Note(Direction.FORWARD), replica=index % replicas)
            found[node].append(_draw(writer, node))
    return {node: _joined(writer, parts) for node, parts in found.items()}


def _draw(writer: Writer, node: fx.Node) -> fx.Node:
    if not node.all_input_nodes:
        return writer.builder.call_as(writer.note, value_of(node), node.target, *node.args, **node.kwargs)  # pyright: ignore
    op, first = as_op(node.target), node.args[0]
    name = "" if op is None else op.name().partition("::")[2]
    if name not in _OF_SIZES or node.all_input_nodes != [first]:
        raise CannotWiden(f"{node.target} draws random numbers that depend on data")
    like: Any = value_of(first)  # pyright: ignore[reportArgumentType]
    empty = writer.call(aten.empty_strided.default, list(like.shape), list(like.stride()), dtype=like.dtype)
    return writer.builder.call_as(writer.note, value_of(node), node.target, empty, *node.args[1:], **node.kwargs)  # pyright: ignore


def _joined(writer: Writer, parts: list[fx.Node]) -> Wide:
    writer.note = note_of(parts[0]) or writer.note
    if value_of(parts[0]).dim():
        return writer.as_folded(writer.call(aten.cat.default, parts))
    return writer.as_stacked(writer.call(aten.stack.default, parts))
