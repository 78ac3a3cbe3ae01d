"""Integers of the user that index something are checked before anything runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 5)

    def forward(self, tokens, labels):
        scores = self.head(self.embedding(tokens)).flatten(0, 1)
        return scores, F.cross_entropy(scores, labels.flatten(), ignore_index=-1)


def training(model: nn.Module, device_iterations: int = 1) -> poptorch.PoplarExecutor:
    options = poptorch.Options().engine("eager").deviceIterations(device_iterations)
    return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))


def batch(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(3).expand(rows, 3).contiguous(), torch.zeros(rows, 3, dtype=torch.int64)


@pytest.mark.parametrize(("argument", "wrong", "valid"), [(0, 10, "0 to 9"), (0, -1, "0 to 9"), (1, 5, "0 to 4")])
def test_index_out_of_range_names_argument_value_and_line(argument, wrong, valid):
    executor = training(Tagger())
    executor(*batch())
    tensors = batch()
    tensors[argument][1, 2] = wrong
    with pytest.raises(poptorch.Error, match=rf"{['tokens', 'labels'][argument]} leads to the index {wrong}") as error:
        executor(*tensors)
    assert isinstance(error.value, IndexError)
    assert valid in error.value.message
    assert "at [1, 2]" in error.value.message
    assert "test_bounds.py" in error.value.message


def test_nothing_of_a_call_with_a_wrong_index_has_run():
    model = Tagger()
    executor = training(model, device_iterations=2)
    executor(*batch(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens, labels = batch(4)
    labels[3, 0] = 99  # in the second update of the call
    with pytest.raises(poptorch.Error, match="99"):
        executor(tokens, labels)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_ignored_labels_are_allowed():
    executor = training(Tagger())
    tokens, labels = batch()
    executor(tokens, labels)
    labels[0] = -1
    assert executor(tokens, labels)[1].isfinite()


class NextToken(nn.Module):
    """The same argument gives inputs and targets, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, text):
        scores = self.head(self.embedding(text[:, :-1]))
        return F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def test_index_computed_from_an_argument_is_checked_in_every_micro_batch():
    executor = training(NextToken(), device_iterations=3)
    text = torch.randint(0, 7, (6, 5))
    executor(text)
    text[5, 4] = 7
    with pytest.raises(poptorch.Error, match="text leads to the index 7"):
        executor(text)


def test_negative_indices_wrap_where_python_lets_them():
    class Pick(nn.Module):
        def forward(self, x, where):
            return x[where]

    executor = poptorch.inferenceModel(Pick(), poptorch.Options().engine("eager"))
    assert executor(torch.tensor([1.0, 2.0]), torch.tensor([-1, 0])).tolist() == [2.0, 1.0]
    with pytest.raises(poptorch.Error, match="-2 to 1"):
        executor(torch.tensor([1.0, 2.0]), torch.tensor([-3, 0]))


# ---- indices that are only known while the program runs


class Lookup(nn.Module):
    """Looks up rows at positions that depend on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.shift = nn.Parameter(torch.arange(8.0).view(4, 2)), nn.Parameter(torch.zeros(1))

    def forward(self, index, target):
        rows = self.table[index + self.shift.long()]
        return rows, F.mse_loss(rows, target)


@pytest.mark.inductor
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_index_that_depends_on_weights_is_named_and_nothing_of_its_update_is_done(engine, accumulation):
    options = poptorch.Options().engine(engine)
    options.Training.gradientAccumulation(accumulation)
    model = Lookup()
    twin = Lookup()
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for wrong in (None, 4, -5, None):
        index = torch.tensor([0, 1, -1, 3])
        if wrong is not None:
            index[2] = wrong
            with pytest.raises(
                IndexError, match=rf"computes the index {wrong}, but index takes -4 to 3(?s:.*)self\.table"
            ):
                executor(index, torch.zeros(4, 2))
            continue
        executor(index, torch.zeros(4, 2))
        optimizer.zero_grad()
        (
            sum(
                twin(*rows)[1]
                for rows in zip(index.chunk(accumulation), torch.zeros(4, 2).chunk(accumulation), strict=True)
            )
            / accumulation
        ).backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_the_worst_index_is_named_if_one_is_ignored():
    class Labels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 3)

        def forward(self, x, labels):
            return F.cross_entropy(self.fc(x), labels + self.fc.bias.detach().long() * 0, ignore_index=-1)

    executor = training(Labels())
    x = torch.ones(3, 2)
    expected = executor(x, torch.tensor([0, 2, -1]))
    assert expected.isfinite()
    for wrong in (3, -2):
        with pytest.raises(IndexError, match=f"computes the index {wrong}, but nll_loss takes 0 to 2"):
            executor(x, torch.tensor([0, wrong, -1]))


def test_values_that_are_read_and_indices_are_guarded_together():
    class Both(Lookup):
        def forward(self, index, target):
            rows = self.table[index + self.shift.long()]
            return F.mse_loss(rows * 2 if target.sum() > 0 else rows, target)

    executor = training(Both())
    executor(torch.tensor([0, 1]), torch.ones(2, 2))
    with pytest.raises(poptorch.Error, match="contradicts the value True"):
        executor(torch.tensor([0, 1]), -torch.ones(2, 2))
    with pytest.raises(IndexError, match="computes the index 9"):
        executor(torch.tensor([0, 9]), torch.ones(2, 2))
    executor(torch.tensor([0, 1]), torch.ones(2, 2))


SAFE = {
    "argmax": lambda x: x[x.argmax(0)],
    "topk": lambda x: x.gather(1, x.topk(2, 1).indices),
    "sort": lambda x: x.gather(0, x.sort(stable=True, dim=0).indices),
    "remainder": lambda x: x[(x.sum(1) * 7).long() % 4],
    "clamp": lambda x: x[x.sum(1).long().clamp(-4, 3)],
    "mask": lambda x: x[torch.tensor([True, False, True, True])],
    "comparison": lambda x: x[:2][(x > 0).any(1).long()],
    "random": lambda x: x[torch.randint(0, 4, (5,))] + x[torch.randperm(4)[:1]],
    "sample": lambda x: x[torch.multinomial(x.abs() + 1, 1)],
    "bucket": lambda x: x[torch.bucketize(x[:, 0], torch.tensor([0.1, 0.5]))],
    "arithmetic": lambda x: x[3 - x.argmax(1) // 2],
    "pooling": lambda x: F.max_unpool2d(*F.max_pool2d(x[None, None, :, :2], 2, return_indices=True), 2),
    "chosen": lambda x: x[torch.where(x[:, 0] > 0, x.argmax(0)[0], torch.arange(4))],
}


@pytest.mark.parametrize("function", SAFE.values(), ids=SAFE)
def test_what_is_known_to_be_in_range_costs_nothing(function):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

        def forward(self, x):
            return function(x * self.weight)

    torch.manual_seed(0)
    executor = poptorch.inferenceModel(Model())
    executor(torch.randn(4, 3))
    assert not executor._executable.checks
    assert not executor._executable.step.guards


# ---- indices that are state


class Positions(nn.Module):
    """Positions in a buffer, as many models of language have them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(3))
        self.table = nn.Embedding(3, 2)

    def forward(self, x):
        y = x + self.table(self.positions)
        return y, F.mse_loss(y, x)


def test_indices_in_a_buffer_are_checked_when_it_changes():
    model = Positions()
    executor = training(model)
    executor(torch.zeros(1, 3, 2))
    assert not executor._executable.step.guards
    model.positions[2] = 3
    with pytest.raises(IndexError, match=r"buffer positions leads to the index 3, but embedding takes 0 to 2"):
        executor(torch.zeros(1, 3, 2))
    model.positions[2] = 0
    executor(torch.zeros(1, 3, 2))


def test_indices_in_a_buffer_are_checked_at_first_too():
    model = Positions()
    model.positions += 1
    with pytest.raises(IndexError, match=r"buffer positions leads to the index 3(?s:.*)self\.table\(self\.positions\)"):
        training(model)(torch.zeros(1, 3, 2))


def test_indices_made_in_inference_mode_are_checked():
    with torch.inference_mode():
        positions = torch.arange(3)

    class Fixed(nn.Module):
        def forward(self, x):
            return x[positions]

    executor = poptorch.inferenceModel(Fixed())
    assert executor(torch.arange(4.0)).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(IndexError, match="a tensor from outside the model leads to the index 2"):
        poptorch.inferenceModel(Fixed())(torch.zeros(2))


def test_an_index_that_the_model_itself_gives_is_checked_at_once():
    class Fixed(nn.Module):
        def forward(self, x):
            return x.index_select(0, torch.arange(2, 5))

    with pytest.raises(
        IndexError, match=r"the model uses the index 4, but index_select takes 0 to 3(?s:.*)test_bounds"
    ):
        poptorch.inferenceModel(Fixed())(torch.zeros(4))


# ---- sizes and lengths


def test_no_indices_are_no_problem():
    class Pick(nn.Module):
        def forward(self, x, where):
            return x[where[:0]].sum()

    assert poptorch.inferenceModel(Pick())(torch.ones(3), torch.tensor([7])) == 0


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x, labels, frames, lengths):
        return F.ctc_loss(self.fc(x).log_softmax(2), labels, frames, lengths)


def test_labels_behind_the_end_of_a_sequence_may_be_anything():
    model = Speech()
    x, frames, lengths = torch.randn(5, 2, 3), torch.tensor([5, 5]), torch.tensor([1, 2])
    expected = model(x, torch.tensor([[1, 0], [2, 3]]), frames, lengths).detach()
    executor = training(model)
    found = executor(x, torch.tensor([[1, -7], [2, 3]]), frames, lengths)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        ("labels", [[1, 0], [2, 4]], "leads to the label 4.*, but ctc_loss takes 0 to 3"),
        ("frames", [5, 6], "leads to the input length 6.*, but ctc_loss takes 0 to 5"),
        ("lengths", [1, 3], "leads to the target length 3.*, but ctc_loss takes 0 to 2"),
    ],
)
def test_ctc_loss_is_checked_before_its_kernel_reads_memory(argument, wrong, message):
    batch = {"x": torch.randn(5, 2, 3), "labels": [[1, 0], [2, 3]], "frames": [5, 5], "lengths": [1, 2]}
    executor = training(Speech())
    good = {name: torch.as_tensor(value) for name, value in batch.items()}
    executor(**good)
    with pytest.raises(IndexError, match=message):
        executor(**{**good, argument: torch.tensor(wrong)})


COUNTS = {
    "bincount": (
        lambda i: torch.bincount(i, minlength=4),
        [0, -1],
        "leads to the value -1.*, but bincount takes 0 or more",
    ),
    "one_hot": (F.one_hot, [1, -1], "leads to the class -1.*, but one_hot takes 0 to 1"),
    "repeat_interleave": (
        lambda i: torch.repeat_interleave(torch.arange(2), i),
        [2, -1],
        "leads to the number of repeats -1.*, but repeat_interleave takes 0 or more",
    ),
}


@pytest.mark.parametrize(("function", "wrong", "message"), COUNTS.values(), ids=COUNTS)
def test_sizes_that_are_read_do_not_hide_wrong_integers(function, wrong, message):
    class Count(nn.Module):
        def forward(self, i):
            return function(i)

    executor = poptorch.inferenceModel(Count())
    good = torch.tensor([0, 1])
    assert torch.equal(executor(good), function(good).int())
    with pytest.raises(IndexError, match=message):
        executor(torch.tensor(wrong))


def test_one_hot_inside_vmap():
    class Codes(nn.Module):
        def forward(self, i):
            return torch.func.vmap(lambda row: F.one_hot(row, 3) * 2)(i)

    i = torch.tensor([[0, 1], [2, 2]])
    assert torch.equal(poptorch.inferenceModel(Codes())(i), Codes()(i).int())
