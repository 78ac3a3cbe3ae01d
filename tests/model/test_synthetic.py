"""Synthetic data: what replaces the caller's tensors, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import popart
import poptorch
from models import Apply, Gate, Regression


def synthetic(mode: popart.SyntheticDataMode = popart.SyntheticDataMode.RandomNormal) -> poptorch.Options:
    options = poptorch.Options().engine("eager")
    options._Popart.set("syntheticDataMode", int(mode))
    return options


def fed(x: torch.Tensor, options: poptorch.Options) -> torch.Tensor:
    """What a model sees instead of `x`."""
    return poptorch.inferenceModel(Apply(lambda x: x.clone()), options)(x)


def test_normal_numbers_replace_the_data():
    seen = fed(torch.full((2000,), 7.0), poptorch.Options().engine("eager").enableSyntheticData(True))
    assert abs(seen.mean()) < 0.1
    assert abs(seen.std() - 1) < 0.1


def test_mode_chooses_zeros_or_uniform_numbers():
    assert not fed(torch.ones(3), synthetic(popart.SyntheticDataMode.Zeros)).any()
    seen = fed(torch.ones(2000), synthetic(popart.SyntheticDataMode.RandomUniform))
    assert seen.min() >= 0
    assert seen.max() <= 1
    assert abs(seen.mean() - 0.5) < 0.1


@pytest.mark.parametrize(
    "value", [torch.tensor([3, 4]), torch.tensor([True, True]), torch.tensor([5, 6]).to(torch.uint8)]
)
def test_integers_and_booleans_are_zero_because_they_may_be_indices(value):
    seen = fed(value, synthetic())
    assert not seen.any()
    assert seen.dtype == (torch.int32 if value.dtype is torch.int64 else value.dtype)


@pytest.mark.parametrize("mode", [popart.SyntheticDataMode.Off, None])
def test_off_means_the_callers_data(mode):
    options = poptorch.Options().engine("eager").enableSyntheticData(False) if mode is None else synthetic(mode)
    assert fed(torch.tensor([7.0]), options).item() == 7


def test_unknown_mode_is_refused_when_the_model_compiles():
    options = poptorch.Options().engine("eager")
    options._Popart.set("syntheticDataMode", 7)
    with pytest.raises(poptorch.Error, match="syntheticDataMode is 7, which is out of range"):
        fed(torch.ones(1), options)


def test_data_is_only_looked_at_for_its_shape():
    lookup = nn.Embedding(3, 2)
    model = poptorch.inferenceModel(lookup, synthetic())
    first = model(torch.tensor([100, -5]))  # no such rows
    torch.testing.assert_close(first, lookup.weight[:1].expand(2, 2).detach())
    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        model(torch.tensor([0]))


def test_callers_tensor_and_random_numbers_are_left_alone():
    def increment(x):
        x += 1

    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    x = torch.full((2,), 7.0)
    poptorch.inferenceModel(Apply(increment), synthetic())(x)
    assert x.tolist() == [7, 7]
    assert torch.rand(1) == expected


def test_training_follows_the_same_synthetic_batch_as_a_frozen_value():
    """A branch on the data is frozen by the synthetic batch, which later calls repeat."""
    model = Gate()
    training = poptorch.trainingModel(model, synthetic(), torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.fc.weight.detach().clone()
    for sign in (1, -1):
        training(sign * torch.ones(2, 3), torch.ones(2, 1))
    assert not torch.equal(model.fc.weight, before)


def test_micro_batches_and_counters():
    options = synthetic().deviceIterations(3).outputMode(poptorch.OutputMode.All)
    model = Regression()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    out, loss = training(torch.zeros(6, 3), torch.zeros(6, 2))
    assert out.shape == (6, 2)
    assert loss.shape == (3,)
    assert (loss > 0).all()
    assert training.getPerfCounters()["input"] == [[], []]
    assert training.getLatency() == (0.0, 0.0, 0.0)
