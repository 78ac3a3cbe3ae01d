"""A parameter as the executor shows it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import poptorch
from models import Scale
from poptorch.model.parameter_proxy import ParameterProxy


@pytest.fixture
def model() -> Scale:
    return Scale(3.0)


@pytest.fixture
def proxy(model: Scale):
    return poptorch.inferenceModel(model, poptorch.Options().engine("eager")).factor


def test_only_parameters_of_the_top_level_are_proxies(proxy):
    nested = poptorch.inferenceModel(torch.nn.Sequential(Scale()))
    assert type(proxy) is ParameterProxy
    assert type(getattr(nested, "0").factor) is torch.nn.Parameter


def test_attributes_are_those_of_the_parameter(model, proxy):
    assert (proxy.shape, proxy.dtype, proxy.item()) == (model.factor.shape, torch.float32, 3)
    proxy.data = torch.tensor([5.0])
    proxy.requires_grad = False
    assert model.factor.item() == 5
    assert not model.factor.requires_grad
    assert (float(proxy), int(proxy)) == (5, 5)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = proxy.nonsense


@pytest.mark.parametrize(
    "compute",
    [
        lambda w: w + 1,
        lambda w: 1 - w,
        lambda w: torch.ones(1) @ w,
        lambda w: torch.ones(1) / w,
        lambda w: 2**w,
        lambda w: -w,
        lambda w: w[0],
        lambda w: w > 2,
        lambda w: torch.cat([w, w]),
        lambda w: torch.nn.functional.relu(w),
        lambda w: torch.stack(list(w)),
    ],
)
def test_torch_takes_it_for_the_parameter(model, proxy, compute):
    assert torch.equal(compute(proxy), compute(model.factor))


def test_gradients_reach_the_parameter(model, proxy):
    (proxy * 2).sum().backward()
    assert model.factor.grad.item() == 2


def test_text_length_truth_and_comparison_are_those_of_the_parameter(model, proxy):
    assert (repr(proxy), len(proxy), bool(proxy)) == (repr(model.factor), 1, True)
    assert torch.equal(proxy == model.factor, torch.tensor([True]))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda proxy: pickle.loads(pickle.dumps(proxy))])
def test_it_can_be_copied_and_pickled(proxy, again):
    assert torch.equal(again(proxy), proxy)
