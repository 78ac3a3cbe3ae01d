"""Exchanges between replicas inside forward, against the same in plain PyTorch on all replicas at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from poptorch.ops.collectives import COLLECTIVES

R, ROWS = 2, 4


class Traced(torch.autograd.Function):
    """A collective in `forward`, as a custom op is called there."""

    @staticmethod
    def forward(ctx, x, name, attributes):
        ctx.name, ctx.attributes = name, attributes
        return COLLECTIVES[name][0]([x], attributes)

    @staticmethod
    def backward(ctx, gradient):
        (found,) = COLLECTIVES[ctx.name][1]([gradient], [], [], ctx.attributes)
        return found, None, None


class Exchanging(nn.Module):
    def __init__(self, name: str, attributes: dict) -> None:
        super().__init__()
        self.name, self.attributes = name, attributes
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        y = Traced.apply(self.fc(x), self.name, self.attributes)
        return y, poptorch.identity_loss((y * torch.arange(y.numel()).view(y.shape)).sum(), reduction="none")


def expected(name: str, attributes: dict, parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What each replica has after the exchange, and what its gradient becomes if all incoming ones are `weights`."""
    count, like = len(parts), parts[0]
    if name == "ReplicatedAllGather":
        weights = torch.arange(count * like.numel()).view(count, *like.shape).float()
        return [torch.stack(parts)] * count, [weights[r] for r in range(count)]
    weights = torch.arange(like.numel()).view(like.shape).float()
    if name == "ReplicatedAllToAll":
        pieces = [part.chunk(count) for part in parts]
        moved = [torch.cat([pieces[q][r] for q in range(count)]) for r in range(count)]
        return moved, [torch.cat([weights.chunk(count)[r]] * count) for r in range(count)]
    if attributes["backwards"]:
        return parts, [weights * count] * count
    return [sum(parts)] * count, [weights] * count


CASES = [
    ("ReplicatedAllGather", {}),
    ("ReplicatedAllReduceTP", {"op": "sum", "backwards": False}),
    ("ReplicatedAllReduceTP", {"op": "sum", "backwards": True}),
    ("ReplicatedAllToAll", {}),
]


@pytest.mark.parametrize(("name", "attributes"), CASES)
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_replicas_exchange_values_and_gradients(name, attributes, replicas, accumulation):
    torch.manual_seed(0)
    model = Exchanging(name, attributes)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    options = poptorch.Options().engine("eager").replicationFactor(replicas).outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(accumulation)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.randn(accumulation * replicas * ROWS, 3)
    y, _ = training(x)
    plain = nn.Linear(3, 3)
    plain.load_state_dict({key.removeprefix("fc."): value for key, value in before.items()})
    steps = [step.chunk(replicas) for step in x.chunk(accumulation)]
    found = [expected(name, attributes, [plain(part) for part in parts]) for parts in steps]
    torch.testing.assert_close(y, torch.cat([value for values, _ in found for value in values]).detach())
    for parts, (_, gradients) in zip(steps, found, strict=True):
        for part, gradient in zip(parts, gradients, strict=True):
            plain(part).backward(gradient / (replicas * accumulation))
    for key, value in plain.named_parameters():
        torch.testing.assert_close(model.state_dict()[f"fc.{key}"], before[f"fc.{key}"] - value.grad)


def test_a_dimension_that_cannot_be_cut_is_named():
    model = Exchanging("ReplicatedAllToAll", {})
    options = poptorch.Options().engine("eager").replicationFactor(3)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(poptorch.Error, match=r"shape \[4, 3\](?s:.*)3 equal parts"):
        training(torch.randn(12, 3))


def test_another_reduction_is_refused():
    model = Exchanging("ReplicatedAllReduceTP", {"op": "max"})
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(poptorch.Error, match="op='max'"):
        training(torch.randn(4, 3))


def test_replicas_that_cannot_be_side_by_side_cannot_exchange():
    class Drawing(Exchanging):
        def forward(self, x):
            return super().forward(x * torch.bernoulli(x.sigmoid()))

    model = Drawing("ReplicatedAllGather", {})
    options = poptorch.Options().engine("eager").replicationFactor(2)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(poptorch.Error, match=r"cannot be computed side by side(?s:.*)depend on data"):
        training(torch.randn(8, 3))


class Table(nn.Module):
    """Looks up rows of a table, of which each replica holds every R-th entry's share: one block of rows."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.clone())

    def forward(self, index):
        everybodys = Traced.apply(self.table, "ReplicatedAllGather", {}).flatten(0, 1)
        rows = everybodys[index]
        return rows, poptorch.identity_loss(rows.square().sum(), reduction="none")


def test_a_table_that_is_spread_over_replicas_gives_the_rows_of_the_whole(engine):
    torch.manual_seed(0)
    whole = torch.randn(8, 3)
    module = Table(whole.view(R, 4, 3))
    options = poptorch.Options().engine(engine).replicationFactor(R).outputMode(poptorch.OutputMode.All)
    training = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))
    training.table.replicaGrouping(poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup)
    index = torch.tensor([0, 5, 7, 3])  # the same for all replicas, as the gradient of the gather has it
    rows, _ = training(index.repeat(R))
    torch.testing.assert_close(rows, whole[index].repeat(R, 1))
    gradient = torch.zeros(8, 3).index_add(0, index, 2 * whole[index]) / R
    torch.testing.assert_close(module.table.detach().view(8, 3), whole - 0.1 * gradient)


def test_replicas_of_other_processes_are_out_of_reach():
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    inference = poptorch.inferenceModel(Exchanging("ReplicatedAllGather", {}), options)
    with pytest.raises(poptorch.Error, match="some of them are in other processes"):
        inference(torch.randn(4, 3))
