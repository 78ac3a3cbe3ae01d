"""Keep the order in which a program calls functions of the user's.

In:    a StepGraph.
Out:   the same graph in which each such call takes a result of the one before: Inductor may run ops that do not depend
       on each other in any order.
Keeps: every value, the signature.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch import fx

from poptorch.engines.host import Host
from poptorch.ir import StepGraph, insert, value_of
from poptorch.ir.ops import takes_turns


def take_turns(graph: StepGraph, host: Host) -> StepGraph:
    """Let each call wait for the one before."""
    if sum(map(takes_turns, graph.ops.nodes)) < 2:
        return graph
    ops = graph.copy_ops()
    earlier: fx.Node | None = None
    for node in list(ops.nodes):
        if takes_turns(node):
            if earlier is not None:
                _wait(ops, node, earlier)
            earlier = node
    return replace(graph, ops=ops)


def _wait(ops: fx.Graph, node: fx.Node, earlier: fx.Node) -> None:
    """Give a call the last result of an earlier one."""
    *arguments, after = node.args
    last = len(value_of(earlier)) - 1
    others: Any = after
    with ops.inserting_before(node):
        node.args = (*arguments, [*others, insert(ops, node, operator.getitem, earlier, last)])
