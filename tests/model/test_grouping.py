"""Weights of which every group of replicas has its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from poptorch.enums import CommGroupType, OutputMode, VariableRetrievalMode


class Sharded(nn.Module):
    """A matrix product with a weight that groups of replicas hold parts of."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        out = torch.matmul(x, self.weight) * self.scale
        return poptorch.identity_loss((out * out).mean(), reduction="none")


def group(model: poptorch.PoplarExecutor, kind: CommGroupType, shards: int) -> None:
    model.weight.replicaGrouping(kind, shards, VariableRetrievalMode.OnePerGroup)


def options(replicas: int) -> poptorch.Options:
    return poptorch.Options().engine("eager").replicationFactor(replicas).outputMode(OutputMode.All)


@pytest.mark.parametrize(
    ("weights", "inputs"),
    [
        ((CommGroupType.Orthogonal, 2), CommGroupType.Consecutive),
        ((CommGroupType.Consecutive, 2), CommGroupType.Orthogonal),
    ],
)
def test_columns_split_over_replicas_train_like_the_whole(weights, inputs):
    torch.manual_seed(0)
    whole, x = torch.randn(40, 56), torch.randn(2, 12, 40)
    parts = torch.stack(whole.split(14, dim=1))  # four groups of two replicas
    module = Sharded(parts)
    model = poptorch.trainingModel(
        module, options(8).inputReplicaGrouping(4, inputs), torch.optim.SGD([module.weight], lr=0.01)
    )
    group(model, *weights)
    reference = nn.Parameter(whole.clone())
    optimizer = torch.optim.SGD([reference], lr=0.01)
    for _ in range(4):
        losses = model(x)
        assert losses.shape == (8,)
        out = torch.matmul(x, reference)
        loss = (out * out).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(losses.sum() / 8, loss.detach())
        now = torch.cat(tuple(module.weight.detach()), dim=1)
        torch.testing.assert_close(now, reference.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.inductor
def test_every_replica_alone_with_adamw(engine):
    torch.manual_seed(0)
    start, x = torch.randn(4, 3, 5), torch.randn(4, 6, 3)
    module = Sharded(start)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model = poptorch.trainingModel(module, options(4).engine(engine), optimizer)
    group(model, CommGroupType.NoGrouping, 0)
    references = [Sharded(weight) for weight in start]
    scale = references[0].scale
    for reference in references:
        reference.scale = scale  # the replicas share what is not grouped
    theirs = torch.optim.AdamW([*(reference.weight for reference in references), scale], lr=0.1)
    for _ in range(3):
        model(x)
        theirs.zero_grad()
        sum(reference(rows) for reference, rows in zip(references, x, strict=True)).div(4).backward()
        theirs.step()
    torch.testing.assert_close(
        module.weight.detach(), torch.stack([r.weight.detach() for r in references]), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(module.scale.detach(), scale.detach(), rtol=1e-4, atol=1e-5)
    state = optimizer.state[module.weight]
    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (4, 3, 5)
    assert float(state["step"]) == 3.0


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adafactor])
def test_state_that_is_not_shaped_like_the_weight(kind):
    """A number per weight, or a vector per dimension: each group of replicas has its own."""

    class Rows(nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight.clone())

        def forward(self, x):
            return poptorch.identity_loss((self.weight * x).sum(), reduction="sum")

    torch.manual_seed(0)
    start, x = torch.randn(2, 5), torch.randn(2, 5)
    module = Rows(start)
    optimizer = kind(module.parameters(), lr=0.1)
    model = poptorch.trainingModel(module, options(2), optimizer)
    group(model, CommGroupType.NoGrouping, 0)
    references = [nn.Parameter(weight.clone()) for weight in start]
    theirs = kind(references, lr=0.1)
    for _ in range(3):
        model(x)
        for reference, row in zip(references, x, strict=True):
            reference.grad = row / 2
        theirs.step()
    torch.testing.assert_close(module.weight.detach(), torch.stack([r.detach() for r in references]))


def test_inference_uses_the_weight_of_each_group():
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))

        def forward(self, x):
            return x * self.weight.exp().log()

    model = poptorch.inferenceModel(Product(), options(4))
    group(model, CommGroupType.Consecutive, 2)
    out = model(torch.ones(4, 3))
    torch.testing.assert_close(out, torch.arange(6.0).view(2, 3).repeat_interleave(2, dim=0))


def test_state_of_an_optimiser_has_an_entry_per_group_under_its_ipu_names():
    module = Sharded(torch.randn(4, 3, 5))
    optimizer = poptorch.optim.AdamW([module.weight], lr=0.1)
    model = poptorch.trainingModel(module, options(4), optimizer)
    group(model, CommGroupType.NoGrouping, 0)
    model(torch.randn(4, 6, 3))
    state = optimizer.state_dict()["ipu_state"]
    assert state["Accl1___weight"].shape == state["Accl2___weight"].shape == (4, 3, 5)


@pytest.mark.parametrize("kind", [CommGroupType.Consecutive, CommGroupType.NoGrouping])
def test_both_retrieval_modes_read_the_same(kind):
    torch.manual_seed(0)
    start, x, trained = torch.randn(4 if kind is CommGroupType.NoGrouping else 2, 3, 5), torch.randn(4, 6, 3), []
    for mode in VariableRetrievalMode:
        module = Sharded(start)
        model = poptorch.trainingModel(module, options(4), torch.optim.SGD(module.parameters(), lr=0.1))
        model.weight.replicaGrouping(kind, 2, mode)
        model(x)
        model.copyWeightsToHost()
        trained.append(module.weight.detach())
    assert trained[0].shape == start.shape
    assert not torch.equal(trained[0], start)
    torch.testing.assert_close(trained[0], trained[1], rtol=0, atol=0)


def test_host_shape_is_back_after_compilation():
    module = Sharded(torch.randn(2, 3, 5))
    model = poptorch.trainingModel(module, options(2), torch.optim.SGD(module.parameters(), lr=0.1))
    group(model, CommGroupType.NoGrouping, 0)
    model.compile(torch.randn(2, 6, 3))
    assert module.weight.shape == (2, 3, 5)


@pytest.mark.parametrize("shape", [(3, 3, 5), ()])
def test_first_dimension_counts_the_groups(shape):
    model = poptorch.inferenceModel(Sharded(torch.ones(shape)), options(4))
    group(model, CommGroupType.Consecutive, 2)
    with pytest.raises(poptorch.Error, match="makes 2 groups of replicas"):
        model(torch.ones(4, 3, 3))


def test_groups_divide_the_replicas():
    model = poptorch.inferenceModel(Sharded(torch.ones(2, 3, 3)), options(4))
    group(model, CommGroupType.Orthogonal, 3)
    with pytest.raises(poptorch.Error, match="do not divide the 4"):
        model(torch.ones(4, 3, 3))


def test_grouping_comes_before_compilation():
    module = Sharded(torch.randn(2, 3, 5))
    model = poptorch.inferenceModel(module, options(2))
    model.weight.replicaGrouping(CommGroupType.NoGrouping, 0)
    model(torch.randn(2, 6, 3))
    with pytest.raises(poptorch.Error, match="comes too late"):
        model.weight.replicaGrouping(CommGroupType.All, 0)
    with pytest.raises(AssertionError):
        poptorch.inferenceModel(module, options(2)).weight.replicaGrouping("All", 0)


def trained_weight(tell) -> torch.Tensor:
    torch.manual_seed(0)
    module = Sharded(torch.randn(2, 3, 4))
    model = poptorch.trainingModel(module, options(2), torch.optim.SGD(module.parameters(), lr=0.1))
    tell(model)
    model(torch.randn(4, 3))
    return module.weight.detach()


def test_groups_may_be_put_into_the_dictionary_as_plain_tuples():
    def by_method(model):
        group(model, CommGroupType.NoGrouping, 1)

    def by_tuple(model):
        model.per_replica_params["weight"] = (CommGroupType.NoGrouping, 1, VariableRetrievalMode.OnePerGroup)

    assert torch.equal(trained_weight(by_method), trained_weight(by_tuple))


@pytest.mark.parametrize(
    ("name", "told", "text"),
    [
        ("wieght", (CommGroupType.NoGrouping, 1, VariableRetrievalMode.OnePerGroup), "did you mean 'weight'?"),
        ("weight", CommGroupType.NoGrouping, r"set \(CommGroupType, shards, VariableRetrievalMode\)"),
        ("weight", ("all", 1, VariableRetrievalMode.OnePerGroup), "comm_group_type"),
    ],
)
def test_wrong_entries_of_the_dictionary_are_refused(name, told, text):
    with pytest.raises(poptorch.Error, match=text):
        trained_weight(lambda model: model.per_replica_params.update({name: told}))


@pytest.mark.parametrize(("kind", "shards"), [(CommGroupType.Consecutive, 2), (CommGroupType.NoGrouping, 0)])
def test_replicas_side_by_side_train_the_weights_of_their_groups(kind, shards):
    torch.manual_seed(0)
    groups = 2 if shards else 4
    start, x = torch.randn(groups, 3, 5), torch.randn(2 * 4 * 6, 3)

    def train(side_by_side: bool) -> list[torch.Tensor]:
        module = Sharded(start)
        chosen = options(4).runSideBySide(side_by_side)
        chosen.Training.gradientAccumulation(2)
        model = poptorch.trainingModel(module, chosen, torch.optim.AdamW(module.parameters(), lr=0.1))
        group(model, kind, shards)
        losses = [model(x) for _ in range(3)]
        assert model._executable.schedule.width == (8 if side_by_side else 1)
        return [*losses, module.weight.detach(), module.scale.detach()]

    torch.testing.assert_close(train(True), train(False))


@pytest.mark.inductor
def test_replicas_side_by_side_infer_with_the_weights_of_their_groups(engine):
    torch.manual_seed(0)
    weight, x = torch.randn(4, 3, 5), torch.randn(4 * 6, 3)
    model = poptorch.inferenceModel(Sharded(weight), options(4).engine(engine).runSideBySide(True))
    group(model, CommGroupType.NoGrouping, 0)
    expected = torch.stack([(part @ each).square().mean() for part, each in zip(x.chunk(4), weight, strict=True)])
    torch.testing.assert_close(model(x), expected)
    assert model._executable.schedule.width == 4
