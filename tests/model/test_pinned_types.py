"""Types of inputs, results and layers as the original's tests pin them, where `docs/semantics.md` keeps them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Apply

TYPES = [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]
DEVICE = {torch.float64: torch.float32, torch.int64: torch.int32, torch.bfloat16: torch.float32}
PAIRS = list(itertools.product(TYPES, TYPES))
UPCAST = poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat


def options() -> poptorch.Options:
    return poptorch.Options().engine("eager")


def run(function, *args, opts: poptorch.Options | None = None):
    return poptorch.inferenceModel(Apply(function), opts or options())(*args)


def narrow(dtype: torch.dtype) -> torch.dtype:
    """The type that a device has in place of this one."""
    return DEVICE.get(dtype, dtype)


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_adding_any_two_types_and_casting_to_any(left, right):
    x, y = torch.tensor([3.4]).to(left), torch.tensor([2.25]).to(right)
    results = run(lambda x, y: [(x + y).to(dtype) for dtype in TYPES], x, y)
    assert [result.dtype for result in results] == [narrow(dtype) for dtype in TYPES]
    expected = [(x.to(narrow(left)) + y.to(narrow(right))).to(dtype).double() for dtype in TYPES]
    torch.testing.assert_close([result.double() for result in results], expected, rtol=0, atol=0.01)


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_comparisons_and_clamp(dtype):
    def function(x):
        constant = torch.tensor(1, dtype=dtype)
        return x.clamp(1, 2), x + 2, x + constant, x > 1, x < 1, x > 1, x == 1

    x = torch.tensor([0, 1, 3]).to(dtype)
    for result, expected in zip(run(function, x), function(x), strict=True):
        assert result.dtype is narrow(expected.dtype)
        assert torch.equal(result, expected.to(narrow(expected.dtype)))


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_equality_across_types_follows_the_device_types(left, right):
    x, y = torch.tensor([550.4]).to(left), torch.tensor([550.4]).to(right)
    precision = options()
    precision.Precision.halfFloatCasting(UPCAST)
    same = run(lambda x, y: x == y, x, y, opts=precision).item()
    assert same == (narrow(left) is narrow(right))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.bool])
def test_small_integers_keep_their_type_until_converted(dtype):
    x = torch.tensor([1, 0, 3]).to(dtype)
    same, converted = run(lambda x: (x, x.float()), x)
    assert same.dtype is dtype
    assert torch.equal(same, x)
    assert torch.equal(converted, x.float())


def test_bfloat16_and_64_bit_inputs_come_back_narrow_even_untouched():
    inputs = [torch.ones(2, dtype=dtype) for dtype in DEVICE]
    assert [result.dtype for result in run(lambda *x: x, *inputs)] == list(DEVICE.values())


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_float16_with_float32_is_float16_unless_the_option_says_otherwise(dtypes):
    x, y = (torch.ones(2, dtype=dtype) for dtype in dtypes)
    assert run(lambda x, y: x + y, x, y).dtype is torch.float16
    precision = options()
    precision.Precision.halfFloatCasting(UPCAST)
    assert run(lambda x, y: x + y, x, y, opts=precision).dtype is torch.float32


@pytest.mark.parametrize(("dtype", "x", "y", "total"), [(torch.float16, 1, 2, 8.0), (torch.float32, 3, 4, 12.0)])
def test_python_numbers_do_not_change_the_type(dtype, x, y, total):
    result = run(lambda x, y: x + y + 5, torch.tensor([x], dtype=dtype), torch.tensor([y], dtype=dtype))
    assert result.dtype is dtype
    assert result.item() == total


def test_two_types_in_one_model_stay_apart():
    half, full = (torch.tensor([value], dtype=dtype) for value, dtype in ((1, torch.float16), (3, torch.float32)))
    results = run(lambda x, y: (x + x + 5, y + y + 5), half, full)
    assert [(result.dtype, result.item()) for result in results] == [(torch.float16, 7.0), (torch.float32, 11.0)]


@pytest.mark.parametrize("reduce", [torch.sum, torch.prod])
def test_a_reduced_comparison_is_an_int32(reduce):
    result = run(lambda x: reduce(x > 1), torch.tensor([2.0, 3.0]))
    assert (result.dtype, result.item()) == (torch.int32, reduce(torch.tensor([1, 1])).item())


def test_a_half_layer_is_close_to_the_float32_one():
    torch.manual_seed(0)
    layer, x = nn.Linear(10, 4), torch.rand(3, 10)
    expected = layer(x).detach()
    result = poptorch.inferenceModel(layer.half(), options())(x.half())
    assert result.dtype is torch.float16
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=1e-3)


LAYERS = [
    nn.Linear(2, 3),
    nn.Conv1d(2, 3, 1),
    nn.ConvTranspose1d(2, 3, 1),
    nn.BatchNorm1d(2),
    nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
    nn.LayerNorm(2),
    nn.GroupNorm(1, 2),
    nn.MultiheadAttention(2, 1),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("weights", [torch.float16, torch.float32])
@pytest.mark.parametrize("activation", [torch.float16, torch.float32])
def test_layers_follow_the_type_of_their_activation(layer, weights, activation):
    layer = copy.deepcopy(layer).to(weights)
    x = ((torch.arange(16.0) * 7 % 11 - 5) / 4).reshape(4, 2, 2).to(activation)  # neighbours differ, float16 is exact
    arguments = (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,)
    first = lambda value: value[0] if isinstance(value, tuple) else value  # noqa: E731
    computed = first(poptorch.inferenceModel(copy.deepcopy(layer), options())(*arguments))
    assert computed.dtype is activation
    expected = first(layer.float()(*(t.float() for t in arguments))).detach()
    torch.testing.assert_close(computed.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("to", [torch.Tensor.half, torch.Tensor.float])
def test_bytes_converted_before_a_layer(to):
    layer = nn.Linear(3, 2)
    x = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
    assert run(lambda x: layer(to(x)), x).dtype is to(x).dtype


class HalfNorm(nn.Module):
    """Half affine parameters, float32 statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3).half()
        self.bn.running_mean = self.bn.running_mean.float()
        self.bn.running_var = self.bn.running_var.float()

    def forward(self, x):
        y = self.bn(x)
        return y, self.bn.running_mean, self.bn.running_var


def test_batch_norm_with_float32_statistics_and_half_weights():
    x = torch.arange(24.0).reshape(8, 3)
    native = nn.BatchNorm1d(3)
    expected = native(x.half().float()).detach()
    y, mean, variance = poptorch.inferenceModel(HalfNorm(), options())(x.half())
    assert (y.dtype, mean.dtype, variance.dtype) == (torch.float16, torch.float32, torch.float32)
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(mean, native.running_mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(variance, native.running_var, rtol=1e-3, atol=1e-3)


class ConvNet(nn.Module):
    """Convolution, norm and a head, as residual networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x, target):
        y = self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3)))
        return y, F.cross_entropy(y, target)


@pytest.mark.parametrize("weights", [torch.float16, torch.float32])
def test_half_training_returns_half_and_updates_weights_in_their_own_type(weights):
    torch.manual_seed(0)
    module = ConvNet().to(weights)
    before = copy.deepcopy(module.state_dict())
    training = poptorch.trainingModel(module, options(), torch.optim.SGD(module.parameters(), lr=0.1))
    y, loss = training(torch.randn(4, 3, 6, 6).half(), torch.tensor([0, 1, 2, 3]))
    assert (y.dtype, loss.dtype) == (torch.float16, torch.float16)
    assert all(parameter.dtype is weights for parameter in module.parameters())
    assert module.bn.running_var.dtype is torch.float32
    assert not torch.equal(module.fc.weight, before["fc.weight"])


@pytest.mark.inductor
def test_native_code_casts_weights_to_the_activation(engine):
    layer = nn.Linear(8, 4)
    x = torch.randn(2, 8).half()
    result = poptorch.inferenceModel(layer, poptorch.Options().engine(engine))(x)
    assert result.dtype is torch.float16
    torch.testing.assert_close(result.float(), layer(x.float()).detach(), rtol=1e-2, atol=1e-2)
