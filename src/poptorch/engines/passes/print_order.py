"""Keep prints in order in native code, which otherwise runs ops when it likes.

In:    a StepGraph.
Out:   the same graph in which each print waits for the one before, and takes its title in a form without quotes.
Keeps: every value; what is printed.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from torch import fx

from poptorch.engines.host import Host
from poptorch.ir import StepGraph

PRINT = torch.ops.poptorch.print_tensor.default


def order_prints(graph: StepGraph, host: Host) -> StepGraph:
    """Hand the result of each print to the next one."""
    if not any(node.target is PRINT for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    earlier: list[fx.Node] = []
    for node in ops.nodes:
        if node.target is PRINT:
            tensor, title, _, _, how = node.args
            said = json.dumps([title, json.loads(str(how))]).encode().hex()
            node.target = torch.ops.poptorch.print_in_order.default
            node.args = ([tensor, *earlier], said)
            earlier = [node]
    return replace(graph, ops=ops)
