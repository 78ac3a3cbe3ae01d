"""Keep prints in order in native code, which otherwise runs ops when it likes.

In:    a StepGraph.
Out:   the same graph in which each print waits for the one before, and takes its title in a form without quotes. A loop
       or branch that prints waits as well, and is waited for.
Keeps: every value; what is printed.
"""

from __future__ import annotations

import json
import operator
from dataclasses import replace

import torch
from torch import fx

from poptorch.engines.control_flow import all_nodes
from poptorch.engines.host import Host, in_bodies_too
from poptorch.ir import StepGraph, insert, is_control, runs_of

PRINT = torch.ops.poptorch.print_tensor.default
PRINT_IN_ORDER = torch.ops.poptorch.print_in_order.default
WAIT = torch.ops.poptorch.wait_for.default


@in_bodies_too
def order_prints(graph: StepGraph, host: Host) -> StepGraph:
    """Hand the result of each print to the next one."""
    if not any(node.target is PRINT or _prints_inside(node, graph) for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    earlier: list[fx.Node] = []
    for node in list(ops.nodes):
        if node.target is PRINT:
            tensor, title, _, _, how = node.args
            said = json.dumps([title, json.loads(str(how))]).encode().hex()
            node.target = PRINT_IN_ORDER
            node.args = ([tensor, *earlier], said)
            earlier = [node]
        elif _prints_inside(node, graph):
            _wait(ops, node, earlier)
            earlier = [_result(ops, node)]
    return replace(graph, ops=ops)


def _prints_inside(node: fx.Node, graph: StepGraph) -> bool:
    """Whether a node is a loop or branch with a print somewhere in its bodies."""
    if not is_control(node):
        return False
    bodies = (graph.graphs[run.graph] for run in runs_of(node))
    return any(inner.target in (PRINT, PRINT_IN_ORDER) for body in bodies for inner in all_nodes(body))


def _wait(ops: fx.Graph, control: fx.Node, earlier: list[fx.Node]) -> None:
    """Let a loop or branch take one of its operands only when something earlier has happened."""
    if not earlier:
        return
    operand = control.all_input_nodes[0]
    with ops.inserting_before(control):
        control.replace_input_with(operand, insert(ops, control, WAIT, operand, earlier))


def _result(ops: fx.Graph, control: fx.Node) -> fx.Node:
    """Something that is there when a loop or branch is done."""
    with ops.inserting_after(control):
        return insert(ops, control, operator.getitem, control, 0)
