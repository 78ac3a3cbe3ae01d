"""Titles for tensors that are printed without one: their names, as users ask for them."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import fx

from poptorch.ir import Direction, StepGraph, note_of
from poptorch.ir.names import Names
from poptorch.ir.ops import unchanged_from

PRINT = torch.ops.poptorch.print_tensor.default
_TITLE, _NUMBER = 1, 2  # the positions of arguments


def name_prints(graph: StepGraph, names: Names) -> StepGraph:
    """Fill in what a tensor is called, and `Gradient___` in front of it for its gradient."""
    if not any(node.target is PRINT and not node.args[_TITLE] for node in graph.ops.nodes):
        return graph
    called = {node.name: name for name, node in reversed(names.values.items())}
    called.update({node.name: spec.name for spec, node in graph.inputs if node.name not in called})
    titles: dict[int, str] = {}  # by the number that a print and that of its gradient share
    ops = graph.copy_ops()
    for node in ops.nodes:
        if node.target is not PRINT:
            continue
        number = cast("int", node.args[_NUMBER])
        if not _is_gradient(node):
            titles[number] = called.get(unchanged_from(node).name, "tensor")
        if not node.args[_TITLE]:
            title = f"Gradient___{titles[number]}" if _is_gradient(node) else titles[number]
            node.update_arg(_TITLE, title)
    return replace(graph, ops=ops)


def _is_gradient(node: fx.Node) -> bool:
    note = note_of(node)
    return note is not None and note.direction is Direction.BACKWARD
