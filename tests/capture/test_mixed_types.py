"""Which type an operation has that mixes float16 and float32."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from poptorch.capture.mixed_types import unify
from poptorch.enums import HalfFloatCastingBehavior

HALF, FLOAT, INT = (torch.ones(2, 2, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.int32))
DEFAULT = HalfFloatCastingBehavior.Default
UPCAST = HalfFloatCastingBehavior.HalfUpcastToFloat


def result(func, *args, casting=DEFAULT, **kwargs) -> torch.dtype:
    args, kwargs = unify(func, args, kwargs, casting)
    return func(*args, **kwargs).dtype


@pytest.mark.parametrize("casting", [DEFAULT, HalfFloatCastingBehavior.FloatDowncastToHalf])
@pytest.mark.parametrize("func", [torch.add, torch.Tensor.mul, torch.Tensor.__rsub__, torch.maximum, torch.matmul])
def test_float16_wins(func, casting):
    assert result(func, HALF, FLOAT, casting=casting) is torch.float16
    assert result(func, FLOAT, HALF, casting=casting) is torch.float16


@pytest.mark.parametrize("func", [torch.add, torch.Tensor.mul, torch.maximum, torch.matmul, torch.Tensor.__matmul__])
def test_float32_wins_on_request(func):
    assert result(func, HALF, FLOAT, casting=UPCAST) is torch.float32
    assert result(func, FLOAT, HALF, casting=UPCAST) is torch.float32


def test_tensors_inside_lists_and_keywords():
    assert result(torch.cat, [HALF, FLOAT]) is torch.float16
    assert result(F.mse_loss, HALF, target=FLOAT) is torch.float16


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (HALF, 1.5, torch.float16),
        (INT, HALF, torch.float16),
        (INT > 0, HALF, torch.float16),
        (INT, FLOAT, torch.float32),
        (INT, 1.5, torch.float32),
        (FLOAT, FLOAT, torch.float32),
    ],
)
@pytest.mark.parametrize("casting", HalfFloatCastingBehavior)
def test_everything_else_is_as_in_pytorch(left, right, expected, casting):
    assert result(torch.add, left, right, casting=casting) is expected


def test_writing_in_place_keeps_the_type_of_the_target():
    args, _ = unify(torch.Tensor.add_, (FLOAT, HALF), {}, DEFAULT)
    assert args[0] is FLOAT
    assert args[1] is HALF


@pytest.mark.parametrize("casting", HalfFloatCastingBehavior)
def test_layers_follow_their_activation(casting):
    assert result(F.linear, HALF, FLOAT, casting=casting) is torch.float16
    assert result(F.linear, FLOAT, HALF, casting=casting) is torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layer", [nn.Linear(3, 3), nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.LayerNorm(3)], ids=str)
def test_layers_of_types_that_a_device_does_not_have_are_float32(layer, dtype):
    """Weights become float32 when the program is made; what forward casts by itself follows them."""

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = copy.deepcopy(layer).to(dtype)

        def forward(self, x):
            return poptorch.identity_loss(self.layer(x.to(dtype)).float().square().mean(), reduction="none")

    model, x = Casting(), torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    expected = copy.deepcopy(model)(x).detach()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    torch.testing.assert_close(training(x), expected, rtol=2e-2, atol=1e-2)
