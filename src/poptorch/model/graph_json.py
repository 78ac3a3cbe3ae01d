"""A compiled model as JSON text, for programs that look into it."""

from __future__ import annotations

import json
from typing import Any

from torch import fx

from poptorch.executable import Executable, Program


def graph_json(executable: Executable) -> str:
    """A dictionary whose `maingraph` lists every op of every program, in the order in which they run."""
    return json.dumps({"maingraph": [_node(program, op) for program in executable.programs for op in _ops(program)]})


def _ops(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.ops.nodes if node.op == "call_function"]


def _node(program: Program, op: fx.Node) -> dict[str, Any]:
    names = {node: spec.name for spec, node in program.graph.inputs}
    return {
        "name": op.name,
        "type": str(op.target),
        "program": program.name,
        "inputs": [names.get(node, node.name) for node in op.all_input_nodes],
    }
