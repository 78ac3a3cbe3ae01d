"""Functions that are wider than PyTorch has them: losses of 16-bit tensors are computed in float32 and rounded once."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Apply

ROWS = 70000  # more than float16 can count


def infer(function, engine="eager"):
    return poptorch.inferenceModel(Apply(function), poptorch.Options().engine(engine))


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


X, Y = drawn(ROWS, 3), drawn(3, ROWS).t().contiguous()
LABELS = torch.arange(ROWS) % 3
SIGNS = torch.where(X > 0, 1.0, -1.0)
LOSSES = {
    "cross_entropy": lambda x, y, **k: F.cross_entropy(x, LABELS, **k),
    "smoothed": lambda x, y, **k: F.cross_entropy(x, LABELS, label_smoothing=0.1, **k),
    "weighted": lambda x, y, **k: F.cross_entropy(x, LABELS, weight=torch.tensor([1.0, 2.0, 3.0]).to(x.dtype), **k),
    "probabilities": lambda x, y, **k: F.cross_entropy(x, y.softmax(1), **k),
    "nll": lambda x, y, **k: F.nll_loss(F.log_softmax(x, 1), LABELS, **k),
    "nll of images": lambda x, y, **k: F.nll_loss(
        x.log_softmax(1).view(7, 100, 100, 3).movedim(-1, 1), LABELS.view(7, 100, 100), **k
    ),
    "mse": lambda x, y, **k: F.mse_loss(x, 20 * y, **k),
    "l1": lambda x, y, **k: F.l1_loss(x, y, **k),
    "smooth l1": lambda x, y, **k: F.smooth_l1_loss(x, y, **k),
    "huber": lambda x, y, **k: F.huber_loss(x, y, **k),
    "bce": lambda x, y, **k: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **k),
    "bce with logits": lambda x, y, **k: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **k),
    "kl": lambda x, y, **k: F.kl_div(x.log_softmax(1), y.softmax(1), **k),
    "poisson": lambda x, y, **k: F.poisson_nll_loss(x, y.abs(), **k),
    "gaussian": lambda x, y, **k: F.gaussian_nll_loss(x, y, torch.ones_like(x), **k),
    "hinge": lambda x, y, **k: F.hinge_embedding_loss(x, SIGNS.to(x.dtype), **k),
    "ranking": lambda x, y, **k: F.margin_ranking_loss(x, y, SIGNS.to(x.dtype), **k),
    "soft margin": lambda x, y, **k: F.soft_margin_loss(x, SIGNS.to(x.dtype), **k),
    "multi margin": lambda x, y, **k: F.multi_margin_loss(x, LABELS, **k),
    "multilabel margin": lambda x, y, **k: F.multilabel_margin_loss(x, LABELS[:, None].expand(-1, 3), **k),
    "multilabel soft margin": lambda x, y, **k: F.multilabel_soft_margin_loss(x, y.sigmoid(), **k),
    "cosine": lambda x, y, **k: F.cosine_embedding_loss(x, y, SIGNS[:, 0].to(x.dtype), **k),
    "triplet": lambda x, y, **k: F.triplet_margin_loss(x, y, -y, **k),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_of_many_rows(name):
    loss = LOSSES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the mean of kl_div means will change
        found, expected = infer(loss)(X.half(), Y.half()), loss(X.half().float(), Y.half().float())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=3e-3, atol=1e-4)


@pytest.mark.parametrize("reduction", ["sum", "batchmean"])
def test_sums_are_float32_until_they_are_divided(reduction):
    """The sum over 6000 rows fits into float16, if it is not rounded on the way."""
    x, y = X[:6000], Y[:6000]

    def loss(x, y):
        return F.kl_div(x.log_softmax(1), y.softmax(1), reduction=reduction)

    found, expected = infer(loss)(x.half(), y.half()), loss(x.half().float(), y.half().float())
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=0)


@pytest.mark.inductor
def test_every_engine_sums_in_float32(engine):
    def losses(x, y):
        return [LOSSES[name](x, y) for name in ("cross_entropy", "weighted", "probabilities", "nll", "mse")]

    found, expected = infer(losses, engine)(X.half(), Y.half()), losses(X.half().float(), Y.half().float())
    assert {loss.dtype for loss in found} == {torch.float16}
    torch.testing.assert_close([loss.float() for loss in found], expected, rtol=3e-3, atol=1e-4)


@pytest.mark.inductor
def test_gradients_of_a_mean_over_many_rows(engine):
    """Their number is beyond float16; a gradient that was divided by it would be zero."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, x, labels):
            return F.cross_entropy(x + self.bias, labels)

    model, wide = Scores().half(), Scores()
    training = poptorch.trainingModel(
        model, poptorch.Options().engine(engine), torch.optim.SGD(model.parameters(), lr=1.0)
    )
    labels = torch.zeros(ROWS, dtype=torch.long)
    training(X.half(), labels)
    wide(X.half().float(), labels).backward()
    torch.testing.assert_close(model.bias.detach().float(), -wide.bias.grad, rtol=2e-2, atol=1e-3)


MANY = drawn(2, ROWS) / 100  # so that the sum of the exponentials is their number
OVER_MANY = {
    "F.log_softmax": lambda x: F.log_softmax(x, 1),
    "method": lambda x: x.log_softmax(-1),
    "torch.log_softmax": lambda x: torch.log_softmax(x, dim=1),
    "special": lambda x: torch.special.log_softmax(x, 1),
    "layer": nn.LogSoftmax(1),
    "torch.logsumexp": lambda x: torch.logsumexp(x, 1),
    "logsumexp": lambda x: x.logsumexp(1, keepdim=True),
    "special.logsumexp": lambda x: torch.special.logsumexp(x, 1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1])),
    "smoothed": lambda x: F.cross_entropy(x, torch.tensor([0, 1]), label_smoothing=0.1),
}


@pytest.mark.parametrize("name", OVER_MANY)
def test_many_classes(name):
    function = OVER_MANY[name]
    found, expected = infer(function)(MANY.half()), function(MANY.half().float())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=1e-3)


def test_arguments_by_keyword():
    found = infer(lambda x: F.cross_entropy(input=x, target=LABELS))(X.half())
    torch.testing.assert_close(found.float(), F.cross_entropy(X.half().float(), LABELS), rtol=2e-3, atol=0)


def test_a_type_that_is_asked_for_counts():
    y = infer(lambda x: F.log_softmax(x, 1, dtype=torch.float32))(MANY.half())
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, F.log_softmax(MANY.half().float(), 1))


def test_ctc_loss_of_half():
    scores = drawn(50, 800, 5)
    targets = torch.arange(800 * 10).view(800, 10) % 4 + 1
    lengths = torch.full((800,), 50), torch.full((800,), 10)

    def loss(x, reduction="mean"):
        return F.ctc_loss(x.log_softmax(2), targets, *lengths, reduction=reduction)

    for reduction in ("mean", "sum"):
        found = infer(lambda x, reduction=reduction: loss(x, reduction))(scores.half())
        expected = loss(scores.half().float(), reduction)
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.float(), expected, rtol=5e-3, atol=0)


def test_a_tensor_may_say_where_to_split():
    def split(x, places):
        return torch.tensor_split(x, places), x.tensor_split(places[0])

    x, places = torch.arange(6.0), torch.tensor([1, 4])
    model = poptorch.inferenceModel(Apply(split))
    torch.testing.assert_close(model(x, places), split(x, places))
    with pytest.raises(poptorch.Error, match="contradicts the value 4"):
        model(x, torch.tensor([1, 5]))


class Thinned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))

    def forward(self, x):
        return poptorch.identity_loss((self.weight * x).to_sparse().to_dense(), "sum")


def test_a_gradient_that_a_sparse_tensor_would_lose_is_refused():
    model = Thinned()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match=r"pass through a sparse tensor(?s:.*)to_sparse\(\)"):
        training(torch.ones(2, 2))
