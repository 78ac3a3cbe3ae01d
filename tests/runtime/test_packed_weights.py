"""Weights that oneDNN wants in another order are brought into it once, unless somebody may still change them."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import poptorch
from models import Regression
from poptorch.runtime.packed_weights import expect_packed

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


def convolutions(*weights, transposed=False, dtype=torch.float32):
    """Ops that convolve images with one weight after the other."""
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in ("x", *dict.fromkeys(weights))}
    for name, node in inputs.items():
        node.meta["val"] = torch.ones(1, 2, 3, 3) if name == "x" else torch.ones(2, 2, 1, 1, dtype=dtype)
    images = inputs["x"]
    for name in weights:
        more = (None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], 1)
        images = graph.call_function(aten.convolution.default, (images, inputs[name], *more))
        images.meta["val"] = torch.ones(1, 2, 3, 3, dtype=dtype)
    graph.output(images)
    return fx.GraphModule(nn.Module(), graph)


def test_only_weights_of_one_convolution_that_stay_the_same_are_packed(monkeypatch):
    def packed(ops, fixed=(1, 2)):
        return [packing.positions for packing in expect_packed(ops, fixed)]

    assert packed(convolutions("a", "b")) == [(1,), (2,)]
    assert packed(convolutions("a", "b"), fixed=(2,)) == [(2,)]
    assert packed(convolutions("a", "b"), fixed=()) == []
    assert packed(convolutions("a", "a", "b")) == [(2,)]
    assert packed(convolutions("a", transposed=True)) == []
    assert packed(convolutions("a", "b", dtype=torch.float64)) == [(1,)]  # of which the images are float32
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert packed(convolutions("a", "b")) == []


def test_only_inference_has_weights_that_stay_the_same():
    model = Regression()
    x, y = torch.ones(1, 3), torch.ones(1, 2)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    inference = poptorch.inferenceModel(model)
    training(x, y)
    inference(x, y)
    assert training._session.executable.step.fixed_positions == ()
    assert inference._session.executable.step.fixed_positions == (0, 1)
