"""Gradients of embeddings are added row by row where the update is linear in them, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from rewrites import on_eager

ROWS = 7


class Lookup(nn.Module):
    """Rows that occur twice, rows that never occur, and a bias that has an ordinary gradient."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 3, **options)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x, y):
        out = self.table(x).sum(1) + self.bias
        return out, F.mse_loss(out, y)


class Tied(Lookup):
    """The same table is looked up and multiplied with."""

    def forward(self, x, y):
        out = (self.table(x).sum(1) + self.bias) @ (self.table.weight.T @ self.table.weight) / 50
        return out, F.mse_loss(out, y)


def sgd(**settings):
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, **settings)


def train_both(kind, make, options, **how):
    """The training model after three calls, next to which plain PyTorch did the same."""
    torch.manual_seed(0)
    model = kind(**how)
    twin = copy.deepcopy(model)
    training = poptorch.trainingModel(model, options, make(model.parameters()))
    reference = make(twin.parameters())
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randint(1, ROWS - 1, (2, 4), generator=generator)
        x[0, :3] = torch.tensor([0, 2, 2])
        y = torch.randn(2, 3, generator=generator)
        _, loss = training(x, y)
        reference.zero_grad()
        expected = twin(x, y)[1]
        expected.backward()
        reference.step()
        torch.testing.assert_close(loss.mean(), expected.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-6)
    return training


def is_scattered(training) -> bool:
    text = str(on_eager(training))
    assert ("aten.index_put" in text) != ("aten.embedding_dense_backward" in text)
    return "aten.index_put" in text


@pytest.mark.parametrize(
    ("make", "scattered"),
    [
        (sgd(), True),
        (sgd(momentum=0.9), True),
        (sgd(momentum=0.9, nesterov=True, weight_decay=0.1), True),
        (sgd(momentum=0.9, dampening=0.5), True),
        (torch.optim.AdamW, False),  # squares the gradient
    ],
)
@pytest.mark.parametrize(("kind", "how"), [(Lookup, {}), (Lookup, {"padding_idx": 2}), (Tied, {})])
def test_rows_are_updated_as_in_plain_pytorch(make, scattered, kind, how):
    training = train_both(kind, make, poptorch.Options(), **how)
    assert is_scattered(training) == scattered


def accumulating(engine: str = "eager", strategy=poptorch.MeanReductionStrategy.Post) -> poptorch.Options:
    options = poptorch.Options().engine(engine).outputMode(poptorch.OutputMode.All).runSideBySide(False)
    options.Training.gradientAccumulation(2)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    return options


@pytest.mark.parametrize("strategy", ["Post", "Running"])
@pytest.mark.parametrize(("kind", "how"), [(Lookup, {}), (Lookup, {"padding_idx": 2}), (Tied, {})])
def test_rows_are_added_to_accumulators(kind, how, strategy):
    """Whatever the update makes of them later."""
    options = accumulating(strategy=poptorch.MeanReductionStrategy[strategy])
    assert is_scattered(train_both(kind, torch.optim.AdamW, options, **how))


@pytest.mark.inductor
def test_native_code_scatters_into_the_accumulators_themselves(engine):
    training = train_both(Lookup, torch.optim.AdamW, accumulating(engine), padding_idx=2)
    assert is_scattered(training)


@pytest.mark.inductor
def test_native_code_scatters_into_the_state_itself(engine):
    training = train_both(Lookup, sgd(momentum=0.9), poptorch.Options().engine(engine), padding_idx=2)
    assert is_scattered(training)


def test_gradients_that_somebody_looks_at_stay_whole():
    by_frequency = train_both(Lookup, sgd(momentum=0.9), poptorch.Options(), scale_grad_by_freq=True)
    assert not is_scattered(by_frequency)
    options = poptorch.Options()
    options.Training.clipGradNorm(1e6)
    assert not is_scattered(train_both(Lookup, sgd(momentum=0.9), options))
