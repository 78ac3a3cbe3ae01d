"""Which values are remembered, and when they count as changed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from poptorch.lightning.constants import Submodules, remember


@pytest.mark.parametrize("value", [1, 0.5, True, "a", [1, 2], (1, "b"), {"a": {"b": [1.0, None]}}], ids=repr)
def test_plain_values_and_containers_of_them_are_remembered(value):
    constant = remember("x", value)
    assert constant.holds(value)
    assert not constant.holds(None)


@pytest.mark.parametrize("value", [None, [], {}, object(), [object()], [torch.zeros(1)], list(range(2000))], ids=type)
def test_other_values_are_not(value):
    assert remember("x", value) is None


def test_names_that_others_change_are_not():
    assert remember("training", True) is None


def test_a_container_that_changes_in_place_has_changed():
    value = {"a": [1]}
    constant = remember("x", value)
    value["a"].append(2)
    assert not constant.holds(value)
    assert "x, which it reads, was {'a': [1]} and is {'a': [1, 2]} now" in constant.change("x", value)


def test_types_count():
    assert not remember("x", 1).holds(1.0)
    assert not remember("x", 1).holds(True)


def test_nan_has_not_changed():
    value = math.nan
    assert remember("x", value).holds(value)


def test_tensors_are_known_by_identity_and_by_writes():
    value = torch.ones(2)
    constant = remember("x", value)
    assert constant.holds(value)
    assert not constant.holds(value.clone())
    value.add_(1)
    assert not constant.holds(value)
    with torch.inference_mode():
        assert remember("x", torch.ones(2)) is None


def test_submodules_are_looked_at():
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))
    values = Submodules(module, without=lambda inner: isinstance(inner, nn.Linear))
    assert values.change() is None
    module.eval()
    module[1].in_features = 7
    assert values.change() is None
    module[0].p = 0.1
    assert values.change().startswith("self.0.p, which it reads, was 0.5 and is 0.1 now")
