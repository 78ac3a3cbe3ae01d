"""Write what users said about values on the ops that it is about.

In:    a StepGraph as it was traced: hints are ops that values pass through, or stand on every op of a scope.
Out:   the same graph without such ops. The note of a product says how much memory it may use, that of a stored value
       that it is one, those of transferred values how; each convolution of a MultiConv has its own options.
Keeps: every value, the signature.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from poptorch.errors import CompileError, explain
from poptorch.ir import Direction, HintValue, StepGraph, give_note, hint_of, note_of, without_identities
from poptorch.ir.ops import as_op, is_view
from poptorch.options import Settings

aten = torch.ops.aten
HINT = torch.ops.poptorch.hint.default
AVAILABLE_MEMORY, CHECKPOINT, MULTI_CONV = "available_memory", "checkpoint", "multi_conv"
OVERLAP_INPUT, OVERLAP_OUTPUT = "overlap_input", "overlap_output"
_FARTHEST = 2  # ops between a value and the product that it comes from
_IDENTITIES = frozenset({aten.detach.default, aten.alias.default, HINT})

# fmt: off
_USING_MEMORY = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution", "convolution_backward",
    "serialized_matmul", "gather", "embedding", "index", "index_select", "embedding_dense_backward", "scatter",
    "scatter_add", "scatter_reduce", "index_add", "index_put", "index_copy", "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward", "_embedding_bag", "_embedding_bag_forward_only",
})
# fmt: on


def settle_hints(graph: StepGraph, settings: Settings) -> StepGraph:
    """Note each hint where later passes look for it, also in the bodies of loops and branches."""
    inner = {name: settle_hints(each, settings) for name, each in graph.graphs.items()}
    if any(inner[name] is not each for name, each in graph.graphs.items()):
        graph = replace(graph, graphs=inner)
    carriers = any(node.target is HINT or hint_of(node, MULTI_CONV) for node in graph.ops.nodes)
    if not carriers:
        return graph
    graph = replace(graph, ops=graph.copy_ops())
    for node in graph.ops.nodes:
        if node.target is HINT:
            _, kind, value = cast("tuple[fx.Node, str, str]", node.args)
            _note_all(_about(node, kind), kind, json.loads(value))
    _settle_multi_convs(graph.ops)
    return without_identities(graph, {HINT})


def _note_all(nodes: Iterable[fx.Node], kind: str, value: HintValue) -> None:
    for node in nodes:
        if (note := note_of(node)) is not None:
            give_note(node, note.with_hint(kind, value))


def _about(hint: fx.Node, kind: str) -> list[fx.Node]:
    """The ops that a hint is about; the hint on a gradient is about the ops that compute further gradients from it."""
    note = note_of(hint)
    is_backward = note is not None and note.direction is Direction.BACKWARD
    if kind == AVAILABLE_MEMORY:
        return list(_nearest(hint, lambda node: list(node.users) if is_backward else node.all_input_nodes))
    if is_backward:
        return []
    if kind == OVERLAP_INPUT:
        return [user for user in _readers(hint) if user.op == "call_function"]
    source = _source(hint)
    return [source] if source.op == "call_function" else []


def _nearest(hint: fx.Node, neighbours: Callable[[fx.Node], list[fx.Node]]) -> Iterator[fx.Node]:
    """The next ops that use temporary memory; what only changes the form of a value does not count as a step."""
    waiting, seen = [(node, 0) for node in neighbours(hint)], set[fx.Node]()
    while waiting:
        node, steps = waiting.pop(0)
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if _kind(node) in _USING_MEMORY:
            yield node
            continue
        is_step = not (is_view(node) or node.target in _IDENTITIES or _kind(node) == "getitem")
        if steps + is_step <= _FARTHEST:
            waiting += [(other, steps + is_step) for other in neighbours(node)]


def _kind(node: fx.Node) -> str:
    op = as_op(node.target)
    return getattr(node.target, "__name__", "") if op is None else op._schema.name.rpartition("::")[2]  # pyright: ignore


def _source(node: fx.Node) -> fx.Node:
    """The op that computed a value, looking through ops that are removed."""
    while node.target in _IDENTITIES:
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.target in _IDENTITIES:
            yield from _readers(user)
        else:
            yield user


# ---- MultiConv


def _settle_multi_convs(ops: fx.Graph) -> None:
    """Give each convolution of a MultiConv its own options; other ops in the scope have nothing to do with it."""
    scopes: defaultdict[HintValue, list[fx.Node]] = defaultdict(list)
    for node in ops.nodes:
        said = hint_of(node, MULTI_CONV)
        if said is not None:
            scopes[said].append(node)
    for said, nodes in scopes.items():
        forward = [node for node in nodes if node.target is aten.convolution.default and _is_forward(node)]
        operands = {node.args[:2]: index for index, node in enumerate(forward)}
        by_weight = {node.args[1]: index for index, node in enumerate(forward)}
        for node in nodes:
            index = _convolution(node, operands, by_weight)
            _note_all([node], MULTI_CONV, None if index is None else _own_options(said, index, forward))


def _is_forward(node: fx.Node) -> bool:
    note = note_of(node)
    return note is not None and note.direction is Direction.FORWARD


def _convolution(node: fx.Node, operands: dict[Any, int], by_weight: dict[Any, int]) -> int | None:
    """Which convolution of its scope an op is, or belongs to the backward pass of."""
    if node.target is aten.convolution.default:
        return operands.get(node.args[:2], by_weight.get(node.args[1]))
    if node.target is aten.convolution_backward.default:
        return operands.get(node.args[1:3], by_weight.get(node.args[2]))
    return None


def _own_options(said: HintValue, index: int, convolutions: list[fx.Node]) -> HintValue:
    options: dict[str, Any] = dict(said)
    for name, value in options.items():
        if isinstance(value, tuple):
            values = cast("tuple[Any, ...]", value)
            if len(values) != len(convolutions):
                raise CompileError(_wrong_count(name, values, convolutions))
            options[name] = values[index]
    scope = options.pop("scope")
    return (("scope", scope), ("convolution", index), *options.items())


def _wrong_count(name: str, values: tuple[Any, ...], convolutions: list[fx.Node]) -> str:
    note = note_of(convolutions[0])
    return explain(
        f"a poptorch.MultiConv has {len(values)} values of {name} for {len(convolutions)} convolution(s).",
        values=str(values),
        where=str(None if note is None else note.line),
        fix="give one value for all of them, or a list with one for each",
    )
