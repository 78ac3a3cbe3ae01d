"""Prints in native code: each waits for the one before."""

from __future__ import annotations

import json

import torch
from torch import nn

import poptorch
from poptorch.engines.passes.print_order import order_prints
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


def test_a_program_that_prints_nothing_stays_as_it_is():
    model = poptorch.inferenceModel(nn.Identity())
    model(torch.ones(1))
    assert not changes(model, order_prints)
