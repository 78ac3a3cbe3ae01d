"""Remove what nothing needs.

In:    any StepGraph.
Out:   the same graph without ops whose results reach no output.
Keeps: random draws, so that a program consumes random numbers as the user's code did; the user's inputs.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from poptorch.ir import StepGraph
from poptorch.options import Settings


def remove_dead_ops(graph: StepGraph, settings: Settings) -> StepGraph:
    """Drop every op whose results reach neither an output nor an effect."""
    if not any(_is_dead(node) for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    ops.eliminate_dead_code()
    return replace(graph, ops=ops)


def _is_dead(node: fx.Node) -> bool:
    return not node.users and not node.is_impure()
