"""Prints in native code: each waits for the one before."""

from __future__ import annotations

import json

import torch
from torch import nn

import poptorch
from models import Apply
from poptorch.engines.passes.print_order import PRINT_IN_ORDER, WAIT, order_prints
from poptorch.ir import is_control
from rewrites import after, changes


class Prints(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        return [poptorch.ipu_print_tensor(x + i, f'"{i}"\n\\', digits=8) for i in range(self.count)]


def compiled(count):
    model = poptorch.inferenceModel(Prints(count))
    model(torch.ones(2))
    return model


def test_each_print_takes_the_result_of_the_one_before():
    graph = after(compiled(3), order_prints)
    prints = [node for node in graph.ops.nodes if str(node.target) == "poptorch.print_in_order.default"]
    assert [list(node.args[0][1:]) for node in prints] == [[], [prints[0]], [prints[1]]]
    assert [json.loads(bytes.fromhex(node.args[1])) for node in prints] == [
        [f'"{i}"\n\\', {"digits": 8}] for i in range(3)
    ]


def test_a_loop_that_prints_waits_and_is_waited_for():
    def forward(x):
        first = poptorch.ipu_print_tensor(x + 1, "first")
        (looped,) = poptorch.for_loop(2, lambda y: poptorch.ipu_print_tensor(y + 1, "loop"), [x])
        return first, looped, poptorch.ipu_print_tensor(x + 2, "last")

    model = poptorch.inferenceModel(Apply(forward))
    model(torch.ones(2))
    graph = after(model, order_prints)
    first, last = (node for node in graph.ops.nodes if node.target is PRINT_IN_ORDER)
    (loop,) = (node for node in graph.ops.nodes if is_control(node))
    (waiting,) = (node for node in graph.ops.nodes if node.target is WAIT)
    assert waiting in loop.all_input_nodes
    assert waiting.args[1] == [first]
    assert [node.all_input_nodes for node in last.args[0][1:]] == [[loop]]
    assert [n.target for body in graph.graphs.values() for n in body.ops.nodes if "print" in n.name] == [PRINT_IN_ORDER]


def test_a_program_that_prints_nothing_stays_as_it_is():
    model = poptorch.inferenceModel(nn.Identity())
    model(torch.ones(1))
    assert not changes(model, order_prints)
