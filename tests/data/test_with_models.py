"""Loaders feed models; numbers in comments are those of the statements in the specification."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import poptorch
from data_sets import Inc, Pairs
from models import Regression
from poptorch import DataLoaderMode, OutputMode, SharingStrategy

ALL_MODES = pytest.mark.parametrize("mode", DataLoaderMode, ids=lambda mode: mode.name)


@pytest.fixture(autouse=True)
def _on_the_eager_engine(monkeypatch):
    monkeypatch.setenv("POPTORCH_ENGINE", "eager")


def loader_of(options, dataset, mode, **arguments):
    if mode is not DataLoaderMode.Sync:
        arguments["async_options"] = {"sharing_strategy": SharingStrategy.Fork}
    return poptorch.DataLoader(options, dataset, mode=mode, **arguments)


class Double(torch.nn.Module):
    def forward(self, x, label=None):
        return x * 2 if label is None else (x * 2, label)


@ALL_MODES
def test_a_doubling_model_sees_the_data_in_order(mode):  # 1, 4, 7
    options = poptorch.Options().deviceIterations(10)
    loader = loader_of(options, Inc(100), mode, batch_size=2)
    model = poptorch.inferenceModel(Double(), options)
    found = [model(batch)[:, 0, 0] for batch in loader]
    assert torch.equal(torch.cat(found), 2.0 * torch.arange(100))


def test_data_and_labels():  # 10
    options = poptorch.Options().deviceIterations(10)
    loader = loader_of(options, Pairs(60), DataLoaderMode.Async, batch_size=2)
    model = poptorch.inferenceModel(Double(), options)
    data_sum = label_sum = 0
    for data, label in loader:
        doubled, same = model(data, label)
        assert same.dtype == torch.int32
        data_sum, label_sum = data_sum + doubled[:, 0, 0].sum(), label_sum + same.sum()
    assert (data_sum, label_sum) == (2 * sum(range(60)), sum(range(60)))


def test_rows_must_divide():  # 15
    model = poptorch.inferenceModel(Double(), poptorch.Options().deviceIterations(4))
    with pytest.raises(AssertionError, match=r"Invalid batch dimension.*6 rows do not split into 4 micro-batches"):
        model(torch.zeros(6, 1))


@ALL_MODES
def test_training_is_the_same_in_every_mode(mode):
    torch.manual_seed(0)
    x = torch.randn(64, 5)
    model = Regression(5, 1)
    options = poptorch.Options().deviceIterations(4)
    loader = loader_of(options, TensorDataset(x, x.sum(1, keepdim=True)), mode, batch_size=4)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [training(*batch)[1].item() for _ in range(10) for batch in loader]
    assert losses[-1] < 1e-3
    assert torch.allclose(model.fc.weight, torch.ones(1, 5), atol=0.05)


def trained(mode, period=None):
    """Outputs and losses of many steps in one call; the same steps in every mode."""
    torch.manual_seed(0)
    model = Regression(10, 10)
    options = poptorch.Options().deviceIterations(200)
    if mode is not None:
        options.outputMode(mode, period)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.02))
    return training(torch.randn(1, 10).repeat(200, 1), torch.randn(1, 10).repeat(200, 1))


def test_outputs_of_many_steps():  # 65 to 68
    out, losses = trained(OutputMode.All)
    assert (out.shape, losses.shape) == ((200, 10), (200,))
    means = losses.view(10, 20).mean(1).tolist()
    assert means == sorted(means, reverse=True)
    every, their_losses = trained(OutputMode.EveryN, 20)
    assert torch.equal(every, out[19::20])
    assert torch.equal(their_losses, losses[19::20])
    last, last_loss = trained(None)
    assert torch.equal(last, out[-1:])
    assert torch.equal(last_loss, losses[-1])
    assert last_loss < 0.2
    total, total_loss = trained(OutputMode.Sum)
    torch.testing.assert_close(total, out.sum(0, keepdim=True), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(total_loss, losses.sum(), rtol=1e-4, atol=1e-4)


def test_batches_reach_the_program_without_a_copy(monkeypatch):
    loader = loader_of(poptorch.Options(), Inc(6), DataLoaderMode.Async, batch_size=2)
    model = poptorch.inferenceModel(Double())
    model.compile(torch.zeros(2, 2, 3))
    given, run = [], model._session.run
    monkeypatch.setattr(model._session, "run", lambda tensors: given.append(tensors[0].data_ptr()) or run(tensors))
    read = []
    for batch in loader:
        read.append(batch.data_ptr())
        model(batch)
    assert given == read
