"""Some ops of a graph as a graph of its own, with views of what they take repeated inside.

A view costs nothing where it is used, but is a second tensor to hand over where it is not.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import cast

import torch
from torch import fx

from poptorch.ir.ops import is_view

_ALSO_VIEWS = (torch.ops.aten._unsafe_view.default,)  # which do not say so


def shows_other(node: fx.Node) -> bool:
    """Whether a node computes nothing: it shows the memory of its first operand in another way."""
    if node.target is operator.getitem:
        return is_view(cast("fx.Node", node.args[0]))
    return is_view(node) or node.target in _ALSO_VIEWS


def with_views(
    ops: Iterable[fx.Node], inside: Collection[fx.Node], taken: Collection[fx.Node] = ()
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Ops in order with the views that lead to their operands, and what those show that is not `inside`.

    Views that are `taken` from outside are not repeated.
    """
    copied: list[fx.Node] = []
    seen: set[fx.Node] = set()
    outside: list[fx.Node] = []

    def visit(node: fx.Node) -> None:
        if node in seen or node in inside:
            return
        seen.add(node)
        if not shows_other(node) or node in taken:
            outside.append(node)
            return
        for used in node.all_input_nodes:
            visit(used)
        copied.append(node)

    for op in ops:
        for used in op.all_input_nodes:
            visit(used)
        copied.append(op)
        seen.add(op)
    return copied, outside
