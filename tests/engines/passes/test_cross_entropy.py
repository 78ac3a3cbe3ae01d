"""Cross entropies over many classes are computed in fewer walks, with the same results."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from poptorch.engines.host import Host
from poptorch.engines.passes.cross_entropy import gradient_of_scores, join_cross_entropies, log_softmax_in_parts
from poptorch.ir import Direction, GraphBuilder, InputSpec, Note, OutputRole, OutputSpec, Role
from poptorch.ir.python import as_function
from rewrites import after, changes, train_once

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
    return changes(executor, join_cross_entropies)


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
    original, joined = executor._executable.step.graph, after(executor, join_cross_entropies)
    values = [torch.zeros(spec.shape, dtype=spec.dtype) + 0.5 for spec in original.signature.inputs[:-2]]
    torch.testing.assert_close(
        as_function(joined.ops)(*values, scores, labels), as_function(original.ops)(*values, scores, labels)
    )
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
    builder, note = GraphBuilder(), Note(Direction.FORWARD)
    values = {
        "scores": batch()[0],
        "labels": batch()[1],
        "gradient": torch.tensor(2.0),
        "count": torch.tensor(42.0),
    }
    specs = [InputSpec.of(name, Role.USER_INPUT, value) for name, value in values.items()]
    scores, labels, gradient, count = map(builder.input, specs)
    softmax = builder.call(note, aten._log_softmax.default, scores, 1, False)
    spread = builder.call(note, aten.nll_loss_backward.default, gradient, softmax, labels, None, 1, -100, count)
    back = builder.call(note, aten._log_softmax_backward_data.default, spread, softmax, 1, torch.float32)
    for name, node in (("softmax", softmax), ("back", back)):
        builder.output(OutputSpec(name, OutputRole.USER_OUTPUT), node)
    graph = builder.build("step")
    joined = join_cross_entropies(graph, Host())
    assert joined is not graph
    expected = as_function(graph.ops)(*values.values())
    torch.testing.assert_close(as_function(joined.ops)(*values.values()), expected)
