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
