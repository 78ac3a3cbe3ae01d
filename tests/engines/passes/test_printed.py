"""What each host pass makes of a small program, as a diff of the printed graph."""

from __future__ import annotations

import difflib
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Apply
from poptorch.engines.host import Host, run_host_passes, unobserved
from poptorch.engines.passes import layers
from poptorch.engines.passes.channels_last import convolution_weights
from poptorch.engines.passes.eager import EAGER
from poptorch.engines.passes.native import NATIVE
from poptorch.executable import Program
from poptorch.ir import StepGraph

HOST = poptorch.CPU(torch.abs, "abs")
PASSES = {apply.__name__: apply for apply in (*EAGER, *NATIVE)}


class WithLoss(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return poptorch.identity_loss(self.layers(x).sum(), reduction="none")


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(512))

    def forward(self, scores, labels):
        return F.cross_entropy(scores + self.bias, labels)


class SelfAttention(nn.Module):
    def forward(self, x):
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads)


def infer(module: nn.Module, *batch: torch.Tensor) -> Program:
    executor = poptorch.inferenceModel(module)
    executor(*batch)
    return executor._executable.step


def train(module: nn.Module, *batch: torch.Tensor) -> Program:
    executor = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    executor(*batch)
    return executor._executable.step


def image() -> torch.Tensor:
    return torch.ones(1, 2, 4, 4)


def in_pieces(x: torch.Tensor) -> torch.Tensor:
    return poptorch.serializedMatMul(x, x, poptorch.MatMulSerializationMode.OutputChannels, 2)


PROGRAMS = {
    "remove_nops": lambda: infer(Apply(lambda x: (poptorch.nop(x), poptorch.nop(x + 1))), torch.ones(2)),
    "order_prints": lambda: infer(Apply(lambda x: [poptorch.ipu_print_tensor(x, t) for t in "ab"]), torch.ones(2)),
    "write_out_products": lambda: infer(Apply(in_pieces), torch.ones(2, 2)),
    "write_out_alpha": lambda: infer(Apply(lambda x: torch.add(x, x, alpha=2.0)), torch.ones(2)),
    "pool_before_relu": lambda: train(WithLoss(nn.Conv2d(2, 2, 1, bias=False), nn.ReLU(), nn.MaxPool2d(2)), image()),
    "separate_bias_gradients": lambda: train(WithLoss(nn.Conv2d(2, 2, 1)), image()),
    "scatter_row_gradients": lambda: train(WithLoss(nn.Embedding(4, 2)), torch.tensor([1, 1, 3])),
    "widen_products": lambda: infer(Apply(lambda x: x @ x), torch.ones(2, 2).half()),
    "join_attentions": lambda: train(WithLoss(nn.Linear(3, 8, bias=False), SelfAttention()), torch.ones(1, 2, 3)),
    "join_cross_entropies": lambda: train(Scores(), torch.ones(64, 512), torch.zeros(64, dtype=torch.int64)),
    "add_biases_last": lambda: infer(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.ones(1, 3)),
    "draw_ahead": lambda: infer(nn.Dropout(0.5), torch.ones(3)),
    "take_turns": lambda: infer(Apply(lambda x: HOST(x) + HOST(x)), torch.ones(2)),
    "use_channels_last": lambda: infer(nn.Conv2d(2, 2, 2), image()),
    "pack_weights": lambda: infer(nn.Conv2d(2, 2, 2), image()),
    "prepare_weights": lambda: infer(nn.Linear(3, 2).half(), torch.ones(1, 3).half()),
    "outline_updates": lambda: train(WithLoss(*[nn.Linear(2, 2) for _ in range(8)]), torch.ones(1, 2)),
    "outline_layers": lambda: train(WithLoss(*[nn.Linear(2, 2) for _ in range(5)]), torch.ones(1, 2)),
}


@pytest.mark.parametrize("name", PASSES)
def test_host_pass(name, golden, monkeypatch):
    monkeypatch.setattr(layers, "_FEWEST_OPS", 1)
    monkeypatch.setattr(layers, "_FEWEST_SAVED", 1)
    program = PROGRAMS[name]()
    host = Host(program.fixed, convolution_weights([program.graph]), fewest_layers=3)
    earlier = tuple(apply for apply in NATIVE[: NATIVE.index(PASSES[name])] if apply.__name__ == "widen_products")
    before = run_host_passes(program.graph, host, earlier, unobserved)
    after = run_host_passes(before, host, (PASSES[name],), unobserved)
    assert after is not before
    texts = [_text(graph).splitlines() for graph in (before, after)]
    lines = difflib.unified_diff(*texts, "before", "after", lineterm="", n=0)
    golden.check("\n".join(line for line in lines if not line.startswith("@@")))


def _text(graph: StepGraph) -> str:
    """The graph without lines of this file, but with the memory layout of inputs that are not contiguous."""
    text = re.sub(r" +(forward|backward|update)( .*)?$", r"  \1", str(graph), flags=re.MULTILINE)
    for spec in graph.signature.inputs:
        if spec.stride != torch.empty(spec.shape, device="meta").stride():
            text += f"\n{spec.name} has strides {spec.stride}"
    return text
