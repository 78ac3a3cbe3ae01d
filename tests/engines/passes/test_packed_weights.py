"""Weights that oneDNN wants in another order are brought into it once, unless somebody may still change them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from models import Regression
from poptorch.engines.host import Host
from poptorch.engines.passes.packed_weights import pack_weights
from poptorch.engines.passes.prepare import prepare_weights
from poptorch.ir import Direction, GraphBuilder, InputSpec, Note, OutputRole, OutputSpec, Role, StepGraph

aten = torch.ops.aten


class Residual(nn.Module):
    """What is packed (convolutions, also grouped ones, and a recurrent layer) and what is not (a shared weight)."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.shared = nn.Conv2d(8, 8, 1)
        self.recurrent = nn.LSTM(8, 6, bidirectional=True)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = self.shared(self.shared(torch.relu(self.grouped(x) + x)))
        return x, self.recurrent(x.flatten(2).movedim(2, 0))[0]


@pytest.mark.inductor
def test_packed_weights_are_renewed_with_the_weights(engine):
    torch.manual_seed(0)
    model = Residual().eval()
    model.norm.running_mean.normal_()
    x = torch.randn(2, 4, 5, 5)
    inference = poptorch.inferenceModel(model, poptorch.Options().engine(engine).replicationFactor(2))
    for _ in range(2):
        with torch.no_grad():
            expected = model(x)[0], torch.cat([model(image)[1] for image in x.split(1)])
        torch.testing.assert_close(inference(x), expected, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        inference.copyWeightsToDevice()


def convolutions(*weights, transposed=False, dtype=torch.float32) -> StepGraph:
    """A graph that convolves images with one weight after the other."""
    builder = GraphBuilder()
    kernel = torch.ones(2, 2, 1, 1, dtype=dtype)
    inputs = {name: builder.input(InputSpec.of(name, Role.PARAMETER, kernel)) for name in dict.fromkeys(weights)}
    images = builder.input(InputSpec.of("x", Role.USER_INPUT, torch.ones(1, 2, 3, 3, dtype=dtype)))
    for name in weights:
        more = (None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], 1)
        images = builder.call(Note(Direction.FORWARD), aten.convolution.default, images, inputs[name], *more)
    builder.output(OutputSpec("output0", OutputRole.USER_OUTPUT), images)
    return builder.build("step")


def packed(graph: StepGraph, fixed=("a", "b")) -> list[str]:
    """The weights that are packed."""
    after = pack_weights(graph, Host(fixed=frozenset(fixed)))
    names = {node: spec.name for spec, node in after.inputs}
    packing = [n for n in after.ops.nodes if n.target is torch.ops.mkldnn._reorder_convolution_weight.default]
    return [names[node.args[0]] for node in packing]


def test_only_weights_of_one_convolution_that_stay_the_same_are_packed(monkeypatch):
    assert packed(convolutions("a", "b")) == ["a", "b"]
    assert packed(convolutions("a", "b"), fixed=["b"]) == ["b"]
    assert packed(convolutions("a", "b"), fixed=[]) == []
    assert packed(convolutions("a", "a", "b")) == ["b"]
    assert packed(convolutions("a", transposed=True)) == []
    assert packed(convolutions("a", "b", dtype=torch.float64)) == []
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert packed(convolutions("a", "b")) == []


def test_packing_is_taken_out_of_the_step():
    host = Host(fixed=frozenset("ab"))
    step = prepare_weights(pack_weights(convolutions("a", "b"), host), host)
    assert [spec.name for spec in step.signature.inputs] == ["prepared:0", "prepared:1", "x"]
    assert [spec.name for spec in step.graphs["prepare"].signature.inputs] == ["a", "b"]


def test_only_inference_has_weights_that_stay_the_same():
    model = Regression()
    x, y = torch.ones(1, 3), torch.ones(1, 2)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    inference = poptorch.inferenceModel(model)
    training(x, y)
    inference(x, y)
    assert training._executable.step.fixed == frozenset()
    assert inference._executable.step.fixed == {"fc.weight", "fc.bias"}
