"""Names for the tensors of a graph, by which users ask for them: where in the model, what kind of op, which result."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx

from poptorch.ir.control import choose_graph, repeat_graph, repeat_while
from poptorch.ir.graph import SCOPE, Direction, Note, StepGraph, note_of
from poptorch.ir.ops import as_op
from poptorch.ir.signature import OutputRole, Role
from poptorch.ir.values import value_of

# What PyTorch calls by several names has one here; the others are called as PyTorch calls them.
_KINDS = {
    "addmm": "MatMul",
    "mm": "MatMul",
    "bmm": "MatMul",
    "baddbmm": "MatMul",
    "convolution": "Conv",
    "max_pool2d_with_indices": "MaxPool",
    "_log_softmax": "LogSoftmax",
    "_softmax": "Softmax",
    "nll_loss_forward": "NllLoss",
}
_CONTROL: dict[Any, str] = {repeat_graph: "Loop", choose_graph: "If", repeat_while: "Loop"}
_HYPERS = {"lr": "scaledLearningRate", "weight_decay": "weightDecay"}


@dataclass(frozen=True)
class Names:
    """What can be asked for: values that the step computes, and state that it leaves behind."""

    values: dict[str, fx.Node]
    state: dict[str, str]  # to the name of an input of the graph


def tensor_names(graph: StepGraph, *, with_paths: bool = True) -> Names:
    """Every tensor of a step under a name; `with_paths` puts the place in the model in front of ops."""
    values: dict[str, fx.Node] = {}
    state: dict[str, str] = {}
    for spec, node in graph.inputs:
        if spec.role is Role.USER_INPUT:
            values[f"input/{spec.key}"] = node
        elif spec.role in (Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER_STATE):
            state[spec.name] = spec.name
        elif spec.role is Role.HYPER:
            group = "loss" if spec.group is None else f"group{spec.group}"
            state[f"{_HYPERS.get(spec.key, spec.key)}___{group}"] = spec.name
    counts: Counter[str] = Counter()
    stems: dict[fx.Node, str] = {}
    for node in graph.ops.nodes:
        note = note_of(node)
        if node.op != "call_function" or note is None or note.direction is Direction.UPDATE or _is_hint(node):
            continue
        if note.name:
            values[note.name] = node
            continue
        if node.target is operator.getitem:
            values[f"{stems[node.args[0]]}:{node.args[1]}"] = node
            continue
        backward = ["Gradient"] if note.direction is Direction.BACKWARD else []
        stem = "/".join([*_place(note, with_paths=with_paths), *backward, _kind(node)])
        counts[stem] += 1
        stems[node] = stem if counts[stem] == 1 else f"{stem}__{counts[stem] - 1}"
        if not isinstance(value_of(node), (tuple, list)):
            values[f"{stems[node]}:0"] = node
    registered = {spec.name for spec in graph.signature.inputs if spec.role in (Role.PARAMETER, Role.BUFFER)}
    for spec, node in graph.outputs:
        if spec.role is OutputRole.GRADIENT:
            values[f"Gradient___{spec.name}"] = node
        elif spec.role is OutputRole.NEW_VALUE and spec.name in registered:
            state[f"UpdatedVar___{spec.name}"] = spec.name
    return Names(values, state)


def _place(note: Note, *, with_paths: bool) -> list[str]:
    """The submodules around an op, and the scopes that users opened, each after as many submodules as it was in."""
    path = note.path.split(".") if note.path else []
    scopes: tuple[tuple[int, str], ...] = note.hint(SCOPE) or ()
    found: list[str] = []
    for depth in range(len(path) + 1):
        found += [name for at, name in scopes if min(at, len(path)) == depth]
        if with_paths:
            found += path[depth : depth + 1]
    return found


def _is_hint(node: fx.Node) -> bool:
    """Whether an op only carries what the user said about its operand."""
    op = as_op(node.target)
    return op is not None and op.name() == "poptorch::hint"


def _kind(node: fx.Node) -> str:
    if node.target in _CONTROL:
        return _CONTROL[node.target]
    op = as_op(node.target)
    name = node.name if op is None else op._schema.name.rpartition("::")[2]  # pyright: ignore[reportPrivateUsage]
    return _KINDS.get(name) or "".join(part.capitalize() for part in name.split("_"))
