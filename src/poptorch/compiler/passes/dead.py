"""Remove what nothing needs.

In:    any StepGraph.
Out:   the same graph without ops whose results reach no output.
Keeps: random draws, so that a program consumes random numbers as the user's code did; the user's inputs.
"""

from __future__ import annotations

from dataclasses import replace

from poptorch.ir import StepGraph
from poptorch.options import Settings


def remove_dead_ops(graph: StepGraph, settings: Settings) -> StepGraph:
    """Drop every op whose results reach neither an output nor an effect."""
    ops = graph.copy_ops()
    ops.eliminate_dead_code()
    return replace(graph, ops=ops)
