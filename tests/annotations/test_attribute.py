"""`Attribute`: notes on operations that change no result."""

from __future__ import annotations

import torch
from torch import nn

import poptorch
from poptorch.annotations.attribute import KEY


class Noted(nn.Module):
    def forward(self, x):
        with poptorch.Attribute(layer="outer", kind="k"):
            x = torch.sin(x)
            with poptorch.Attribute(layer="inner"):
                x = torch.cos(x)
            x = torch.tanh(x)
        return torch.exp(x)


def test_operations_carry_the_attributes_of_their_scope():
    model = poptorch.inferenceModel(Noted(), poptorch.Options().engine("eager"))
    x = torch.randn(3)
    assert torch.allclose(model(x), Noted()(x))
    nodes = model._executable.step.graph.ops.nodes
    found = {str(node.target): node.meta.get("custom", {}).get(KEY) for node in nodes if node.op == "call_function"}
    outer = {"layer": "outer", "kind": "k"}
    assert found["aten.sin.default"] == outer
    assert found["aten.cos.default"] == {"layer": "inner", "kind": "k"}
    assert found["aten.tanh.default"] == outer
    assert found["aten.exp.default"] is None


def test_one_object_can_be_used_again():
    attribute = poptorch.Attribute(layer="x")
    for _ in range(2):
        with attribute:
            pass
