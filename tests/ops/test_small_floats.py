"""Rounding to small floats: against PyTorch's own small types."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poptorch.ops.small_floats import SmallFloat

KNOWN = [(5, 10, torch.float16), (8, 7, torch.bfloat16), (5, 2, torch.float8_e5m2)]


@pytest.mark.parametrize(("exponent", "mantissa", "dtype"), KNOWN)
def test_every_float_rounds_as_pytorch_rounds_it(exponent, mantissa, dtype):
    torch.manual_seed(0)
    x = torch.randn(20_000) * 2.0 ** torch.randint(-40, 17, (20_000,))
    finite = x.abs() <= SmallFloat(exponent, mantissa).largest
    assert torch.equal(SmallFloat(exponent, mantissa).round(x)[finite], x.to(dtype).float()[finite])


@pytest.mark.parametrize(("exponent", "mantissa", "dtype"), KNOWN)
def test_every_number_of_the_format_stays(exponent, mantissa, dtype):
    bits = torch.arange(-128, 128, dtype=torch.int8) if dtype.itemsize == 1 else torch.arange(-32768, 32768).short()
    numbers = bits.view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    assert torch.equal(SmallFloat(exponent, mantissa).round(numbers), numbers)


def test_what_is_too_large_becomes_the_largest_and_nan_stays():
    found = SmallFloat(5, 10).round(torch.tensor([1e9, -float("inf"), float("nan"), 0.0]))
    assert found[:2].tolist() == [65504, -65504]
    assert found[2].isnan()
    assert found[3] == 0


@given(st.floats(-100, 100, width=32), st.integers(2, 8), st.integers(0, 23))
def test_stochastic_rounding_gives_a_neighbour(value, exponent, mantissa):
    small = SmallFloat(exponent, mantissa)
    x = torch.tensor([value]).clamp(-small.largest, small.largest)
    found = small.round(x.expand(20), stochastic=True)
    assert torch.equal(small.round(found), found)
    assert ((found - x).abs() <= 2 * (small.round(x) - x).abs().clamp(min=0) + _step(small, x)).all()


def _step(small, x):
    exponent = max(int(torch.frexp(x.double()).exponent) - 1, small.least_exponent)
    return 2.0 ** (exponent - small.mantissa_bits)


def test_stochastic_rounding_is_right_on_average():
    torch.manual_seed(0)
    found = SmallFloat(5, 2).round(torch.full((20_000,), 1.05), stochastic=True)
    assert set(found.tolist()) == {1.0, 1.25}
    assert found.mean().item() == pytest.approx(1.05, abs=0.005)
