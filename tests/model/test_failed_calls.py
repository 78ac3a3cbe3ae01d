"""A first call that fails leaves the executor as if it had never happened."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, indices):
        return self.table(indices)


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        if x.shape[1] != 3:
            raise ValueError("three columns, please")
        return self.fc(x)


def test_arguments_of_a_first_call_that_fails_while_running_are_forgotten():
    model = poptorch.inferenceModel(Lookup())
    with pytest.raises(IndexError):
        model(torch.tensor([9]))
    assert not model.isCompiled()
    assert model(torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)).shape == (2, 2, 2)


def test_arguments_of_a_first_call_that_fails_while_compiling_are_forgotten():
    model = poptorch.inferenceModel(Picky())
    with pytest.raises(ValueError, match="three columns, please"):
        model(torch.ones(2, 4))
    assert not model.isCompiled()
    assert model(torch.ones(2, 3)).shape == (2, 2)


def test_a_failed_call_of_another_shape_leaves_the_program_that_there_was():
    model = poptorch.inferenceModel(Lookup(), poptorch.Options().allowShapeChanges(True))
    model(torch.tensor([1]))
    with pytest.raises(IndexError):
        model(torch.tensor([1, 9]))
    assert model.compilationReport().startswith("1 program(s)")
    assert model(torch.tensor([2])).shape == (1, 2)


def test_a_later_call_that_fails_keeps_the_program():
    model = poptorch.inferenceModel(Lookup())
    model(torch.tensor([1]))
    with pytest.raises(IndexError):
        model(torch.tensor([9]))
    assert model.isCompiled()
