"""Calls of changing shape: refused with both signatures shown, or compiled for each."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, x, y):
        out = self.layer(x)
        return out, F.mse_loss(out, y)


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 3), torch.randn(rows, 2)


def training(module: nn.Module, allow: bool = True) -> tuple[poptorch.PoplarExecutor, torch.optim.Optimizer]:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    options = poptorch.Options().engine("eager").allowShapeChanges(allow)
    return poptorch.trainingModel(module, options, optimizer), optimizer


def test_default_error_shows_both_signatures():
    model, _ = training(Trained(), allow=False)
    model(*batch(4))
    with pytest.raises(poptorch.Error) as raised:
        model(*batch(6))
    text = raised.value.message
    assert "expected torch.Size([4, 3]) but got torch.Size([6, 3])" in text
    assert "(x: f32[4,3], y: f32[4,2])" in text
    assert "(x: f32[6,3], y: f32[6,2])" in text
    assert "allowShapeChanges" in text


def test_training_with_changing_shapes_equals_eager():
    module = Trained()
    reference = copy.deepcopy(module)
    model, optimizer = training(module)
    theirs = torch.optim.Adam(reference.parameters(), lr=0.1)
    for rows in (4, 6, 4, 4, 6, 2):
        x, y = batch(rows)
        _, loss = model(x, y)
        theirs.zero_grad()
        expected = reference(x, y)[1]
        expected.backward()
        theirs.step()
        torch.testing.assert_close(loss, expected.detach())
        for a, b in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    state = optimizer.state_dict()["state"]
    assert [float(entry["step"]) for entry in state.values()] == [6.0, 6.0]
    torch.testing.assert_close(state, theirs.state_dict()["state"])
    assert len(model._programs.variants) == 3


def test_learning_rate_reaches_every_program():
    module = Trained()
    model, optimizer = training(module)
    model(*batch(4)), model(*batch(6))
    optimizer.param_groups[0]["lr"] = 0.0
    model.setOptimizer(optimizer)
    before = copy.deepcopy(module.state_dict())
    model(*batch(4)), model(*batch(6))
    torch.testing.assert_close(module.state_dict(), before)


def test_report_says_what_was_compiled_and_why():
    model, _ = training(Trained())
    model(*batch(4)), model(*batch(6)), model(*batch(4))
    first, one, two = model.compilationReport().splitlines()
    assert first == "2 program(s) compiled"
    assert one.startswith("1. (x: f32[4,3], y: f32[4,2]) in ")
    assert one.endswith("the first call")
    assert two.endswith("Shape mismatch for x: expected torch.Size([4, 3]) but got torch.Size([6, 3])")


def test_inference_programs_all_see_new_weights():
    module = Trained()
    model = poptorch.inferenceModel(module.layer, poptorch.Options().engine("eager").allowShapeChanges(True))
    small, large = torch.randn(2, 3), torch.randn(5, 3)
    model(small), model(large)
    with torch.no_grad():
        module.layer.weight.mul_(3)
    trained, _ = training(module)
    trained(*batch(4))
    for x in (small, large, small):
        torch.testing.assert_close(model(x), module.layer(x).detach())


def test_failed_second_compilation_keeps_the_first_program():
    model, _ = training(Trained())
    x, y = batch(4)
    model(x, y)
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 5), y)
    model(x, y)
    assert model.isAttachedToDevice()


def test_programs_of_one_model_draw_from_one_stream():
    """Another shape goes on where the last call stopped, as a model of one program would."""

    class Noise(torch.nn.Module):
        def forward(self, x):
            return x + torch.rand(2)

    options = poptorch.Options().engine("eager").randomSeed(5)
    fixed = poptorch.inferenceModel(Noise(), options.clone())
    changing = poptorch.inferenceModel(Noise(), options.allowShapeChanges())
    expected = [fixed(torch.zeros(1, 2))[0] for _ in range(4)]
    drawn = [changing(torch.zeros(rows, 2))[0] for rows in (1, 3, 1, 3)]
    torch.testing.assert_close(drawn, expected, rtol=0, atol=0)
