"""Cross entropies over many classes are computed in fewer walks, with the same results."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import poptorch
from poptorch.runtime.cross_entropy import gradient_of_scores, join_cross_entropies, log_softmax_in_parts
from rewrites import targets_after, train_once

aten = torch.ops.aten
ROWS, CLASSES = 64, 1024


def batch(rows: int = ROWS, classes: int = CLASSES):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, classes, generator=generator) * 20
    labels = torch.randint(classes, (rows,), generator=generator)
    labels[::3] = -100
    return scores, labels


def loss_and_gradient(function, scores, *rest):
    scores = scores.clone().requires_grad_()
    loss = function(scores, *rest)
    loss.sum().backward()
    return loss.detach(), scores.grad


def test_log_softmax_in_parts():
    scores, _ = batch()
    result, powers, sums = log_softmax_in_parts(scores)
    torch.testing.assert_close(result, F.log_softmax(scores, 1))
    torch.testing.assert_close(powers / sums, F.softmax(scores, 1))
    assert powers.max() == 1.0


def test_gradient_of_each_row():
    """Rows with an ignored label have none, whatever comes in for them."""
    scores, labels = batch()
    incoming = torch.randn(ROWS)
    _, powers, sums = log_softmax_in_parts(scores)
    found = gradient_of_scores(incoming, powers, sums, labels, -100)
    _, expected = loss_and_gradient(lambda s: F.cross_entropy(s, labels, reduction="none") * incoming, scores)
    torch.testing.assert_close(found, expected)
    assert found[0].count_nonzero() == 0


class Loss(nn.Module):
    """Scores with a bias to learn, and a cross entropy with options."""

    def __init__(self, classes: int = CLASSES, **options) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(classes))
        self.options = options

    def forward(self, scores, labels):
        loss = F.cross_entropy(scores + self.bias, labels, **self.options)
        return loss, poptorch.identity_loss(loss, reduction="sum")


def is_joined(executor) -> bool:
    return gradient_of_scores in targets_after(join_cross_entropies, executor)


@pytest.mark.inductor
def test_training_with_many_classes(engine):
    model, (scores, labels) = Loss(), batch()
    executor, (loss, _) = train_once(model, engine, scores, labels, lr=1.0)
    expected, gradient = loss_and_gradient(lambda s: F.cross_entropy(s, labels), scores)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.bias.detach(), -gradient.sum(0), rtol=1e-4, atol=1e-6)
    assert is_joined(executor)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_other_reductions(reduction):
    """The joined graph, run as it is, gives the new bias that the original gives."""
    model, (scores, labels) = Loss(reduction=reduction), batch()
    executor, _ = train_once(model, "eager", scores, labels)
    step = executor._executable.step
    joined, original = step.functional_ops(), step.functional_ops()
    join_cross_entropies(joined.graph)
    joined.recompile()
    values = [torch.zeros(spec.shape, dtype=spec.dtype) + 0.5 for spec in step.signature.inputs[:-2]]
    torch.testing.assert_close(joined(*values, scores, labels), original(*values, scores, labels))
    assert is_joined(executor)


def test_rows_without_labels_have_no_gradient_even_if_their_mean_is_not_a_number():
    scores, labels = batch()
    _, powers, sums = log_softmax_in_parts(scores)
    found = gradient_of_scores(torch.tensor(math.nan), powers, sums, torch.full_like(labels, -100), -100)
    assert found.count_nonzero() == 0


@pytest.mark.parametrize(
    "model",
    [
        Loss(classes=10),
        Loss(weight=torch.rand(CLASSES)),
        Loss(label_smoothing=0.1),
    ],
    ids=["few classes", "weighted classes", "label smoothing"],
)
def test_other_losses_are_left_alone(model):
    scores, labels = batch(classes=len(model.bias))
    executor, _ = train_once(model, "eager", scores, labels)
    assert not is_joined(executor)


def test_a_log_softmax_that_is_used_for_more_keeps_its_value():
    graph = fx.Graph()
    scores, labels, gradient, count = (graph.placeholder(name) for name in ("scores", "labels", "gradient", "count"))
    softmax = graph.call_function(aten._log_softmax.default, (scores, 1, False))
    softmax.meta["val"] = torch.empty(ROWS, CLASSES, device="meta")
    spread = graph.call_function(aten.nll_loss_backward.default, (gradient, softmax, labels, None, 1, -100, count))
    back = graph.call_function(aten._log_softmax_backward_data.default, (spread, softmax, 1, torch.float32))
    graph.output((softmax, back))
    before = fx.GraphModule(nn.Module(), graph)
    values = (*batch(), torch.tensor(2.0), torch.tensor(42.0))
    expected = before(*values)
    join_cross_entropies(before.graph)
    before.recompile()
    torch.testing.assert_close(before(*values), expected)
