"""What engines leave out: a nop costs nothing, and results keep memory of their own."""

from __future__ import annotations

import torch
from torch import nn

import poptorch
from poptorch.engines.passes.nops import remove_nops
from rewrites import after, changes


class Nops(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        self.count += 1
        y = poptorch.nop(x * 2)
        return y, poptorch.nop(x), poptorch.nop(poptorch.nop(self.count))


class Plain(nn.Module):
    def forward(self, x):
        return x * 2


def compiled(module):
    model = poptorch.inferenceModel(module)
    return model, model(torch.ones(2))


def test_nops_are_left_out_unless_a_result_would_show_state():
    model, _ = compiled(Nops())
    graph = after(model, remove_nops)
    found = [str(node.target) for node in graph.ops.nodes if node.op == "call_function"]
    assert "poptorch.nop.default" not in found
    assert found.count("aten.clone.default") == 2


def test_results_have_memory_of_their_own():
    x = torch.ones(2)
    model = poptorch.inferenceModel(Nops())
    y, shown, count = model(x)
    shown += 5
    count += 5
    assert x.tolist() == [1, 1]
    assert y.tolist() == [2, 2]
    assert model(x)[2].tolist() == [2, 2]


def test_a_program_without_nops_stays_as_it_is():
    assert not changes(compiled(Plain())[0], remove_nops)
