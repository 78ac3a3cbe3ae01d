"""Replicas of an input group compute on the same rows."""

from __future__ import annotations

import pytest
import torch

import poptorch
from models import Regression, Scale
from poptorch import CommGroupType, OutputMode


def options(replicas, size, kind):
    return poptorch.Options().engine("eager").replicationFactor(replicas).inputReplicaGrouping(size, kind)


@pytest.mark.parametrize(
    ("kind", "order"),
    [(CommGroupType.Consecutive, [0, 0, 1, 1]), (CommGroupType.Orthogonal, [0, 1, 0, 1])],
)
def test_outputs_show_which_replica_was_fed_what(kind, order):
    model = poptorch.inferenceModel(Scale(2.0), options(4, 2, kind))
    rows = torch.tensor([[1.0], [5.0]])
    assert torch.equal(model(rows), 2 * rows[order])


def test_later_steps_read_later_rows():
    model = poptorch.inferenceModel(Scale(1.0), options(4, 2, CommGroupType.Consecutive).deviceIterations(3))
    rows = torch.arange(6.0).reshape(6, 1)
    expected = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert model(rows).flatten().tolist() == expected


class Shapes(torch.nn.Module):
    """Tells a function which shapes it sees while it is compiled."""

    def __init__(self, tell):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(40))
        self.tell = tell

    def forward(self, x):
        self.tell(x.shape)
        return poptorch.identity_loss((x * self.weight).sum(), "none")


@pytest.mark.parametrize("kind", [CommGroupType.Consecutive, CommGroupType.Orthogonal])
def test_forward_sees_one_group_and_all_replicas_return(kind):
    seen = set()
    training = poptorch.trainingModel(Shapes(seen.add), options(8, 4, kind).outputMode(OutputMode.All))
    loss = training(torch.ones(2, 12, 40))
    assert loss.shape == (8,)
    assert seen == {torch.Size([1, 12, 40])}


@pytest.mark.parametrize("kind", [CommGroupType.Consecutive, CommGroupType.Orthogonal])
def test_training_with_equal_groups_is_training_on_the_distinct_rows(kind):
    torch.manual_seed(0)
    grouped, plain = Regression(), Regression()
    plain.load_state_dict(grouped.state_dict())
    x, target = torch.randn(4, 3), torch.randn(4, 2)
    one = poptorch.trainingModel(grouped, options(4, 2, kind), torch.optim.SGD(grouped.parameters(), lr=0.1))
    two = poptorch.trainingModel(
        plain,
        poptorch.Options().engine("eager").replicationFactor(2),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    for _ in range(3):
        one(x, target)
        two(x, target)
    assert torch.allclose(grouped.fc.weight, plain.fc.weight)
