"""Products in pieces, written out for native code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from poptorch import MatMulSerializationMode as Mode
from poptorch.engines.passes.serialized import write_out_products
from poptorch.ir import verify
from poptorch.ir.python import as_function
from rewrites import after, changes


class Product(nn.Module):
    """A product with weights, trained, in float32 or float16."""

    def __init__(self, mode: Mode, shape: tuple[int, ...], dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        weight = (4, 6) if len(shape) < 4 else (shape[0], 1, 4, 6)
        self.weight, self.scale = nn.Parameter(torch.randn(weight)), nn.Parameter(torch.ones(shape[-2], 1))
        self.weight.data, self.scale.data = self.weight.data.to(dtype), self.scale.data.to(dtype)
        self.mode, self.x = mode, torch.randn(*shape[:-2], shape[-1], shape[-2]).to(dtype)

    def forward(self, x):
        x = x.transpose(-2, -1) * self.scale
        y = poptorch.serializedMatMul(
            x.transpose(-2, -1).contiguous().transpose(-2, -1), self.weight, self.mode, 2, True
        )
        return y, poptorch.identity_loss(y.float().square(), "sum")


def train(module: nn.Module) -> Any:
    executor = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.01))
    executor(module.x)
    return executor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(6, 4), (3, 6, 4), (2, 3, 6, 4)])
@pytest.mark.parametrize("mode", [Mode.InputChannels, Mode.ReducingDim, Mode.OutputChannels])
def test_pieces_compute_what_the_ops_compute(mode, shape, dtype):
    training = train(Product(mode, shape, dtype))
    graph = training._executable.step.graph
    pieces = after(training, write_out_products)
    verify(pieces)
    assert not any("serialized" in str(node.target) for node in pieces.ops.nodes)
    inputs = [torch.randn(spec.shape).to(spec.dtype) * 0.5 for spec in graph.signature.inputs]
    results = [as_function(each.ops)(*inputs) for each in (graph, pieces)]
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.float16 else {}
    torch.testing.assert_close(results[1], results[0], **tolerance)


def test_a_program_without_such_products_stays_as_it_is():
    model = poptorch.inferenceModel(nn.Linear(2, 2))
    model(torch.ones(1, 2))
    assert not changes(model, write_out_products)
