"""A compiled model as JSON text, for programs that look into it."""

from __future__ import annotations

import json
from typing import Any

from torch import fx

from poptorch.executable import Executable, Program
from poptorch.ir import note_of
from poptorch.ir.names import tensor_names


def graph_json(executable: Executable) -> str:
    """A dictionary whose `maingraph` lists every op of every program, in the order in which they run."""
    nodes: list[dict[str, Any]] = []
    for program in executable.programs:
        called = _called(program)
        nodes += [_node(program, op, called) for op in _ops(program)]
    return json.dumps({"maingraph": nodes})


def _ops(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.ops.nodes if node.op == "call_function"]


def _node(program: Program, op: fx.Node, called: dict[fx.Node, str]) -> dict[str, Any]:
    names = {node: spec.name for spec, node in program.graph.inputs}
    note = note_of(op)
    return {
        "name": called.get(op, op.name),
        "type": str(op.target),
        "program": program.name,
        "inputs": [names.get(node) or called.get(node, node.name) for node in op.all_input_nodes],
        "attributes": {} if note is None else {kind: _plain(value) for kind, value in note.hints},
    }


def _called(program: Program) -> dict[fx.Node, str]:
    """Ops by the names of their results, as users ask for those."""
    return {node: name.removesuffix(":0") for name, node in tensor_names(program.graph).values.items()}


def _plain(value: Any) -> Any:
    """The value of a hint, with dictionaries in place of pairs of a text and a value."""
    if not isinstance(value, tuple):
        return value
    is_mapping = all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in value)
    return {name: _plain(item) for name, item in value} if is_mapping else [_plain(item) for item in value]
