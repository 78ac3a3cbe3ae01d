"""Helpers for the tests of users."""

from __future__ import annotations

import pytest
import torch

import poptorch.testing

one, near, far = torch.ones(2), torch.ones(2) + 1e-7, torch.zeros(2)


@pytest.mark.parametrize(
    ("ref", "other", "close"),
    [
        (one, near, True),
        (one, far, False),
        (one, torch.ones(1), False),
        ((one, [far]), (near, [far]), True),
        ((one,), [one], False),
        ((one,), (one, one), False),
        ([one, (far, 3)], [one, (far, 3)], True),
        ([one, 3], [one, 4], False),
    ],
)
def test_nested_results_are_compared_item_by_item(ref, other, close):
    assert poptorch.testing.allclose(ref, other) is close
