"""Results as the original's tests pin them, beyond what `test_results.py` shows."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn

import poptorch
from models import Apply


def wrap(module: nn.Module) -> poptorch.PoplarExecutor:
    return poptorch.inferenceModel(module, poptorch.Options().engine("eager"))


def one(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


def assert_same(result, expected) -> None:
    """Equal in structure, types of containers, and values."""
    assert type(result) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(result, expected)
    elif isinstance(expected, dict):
        assert list(result) == list(expected)
        for key, value in expected.items():
            assert_same(result[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(result) == len(expected)
        for item, value in zip(result, expected, strict=True):
            assert_same(item, value)
    else:
        assert result == expected


class Named(NamedTuple):
    total: torch.Tensor
    parts: tuple


STRUCTURES = {
    "tuple": lambda x, y: (x + y, x * y),
    "list": lambda x, y: [x + y, x - y],
    "nested": lambda x, y: ((x + y, (x - y, [x * y])), y / x),
    "dictionary": lambda x, y: {"b": x + y, "a": x - y},
    "named tuple": lambda x, y: Named(x + y, (x, y)),
    "same tensor twice": lambda x, y: [(z := x + y), (z, {"z": z})],
    "inputs with a computed value": lambda x, y: (x, x + y, y),
    "constant and computed": lambda x, y: (c := torch.tensor([1.0]), (x + c, [c, y * c])),
    "only constants": lambda x, y: [torch.ones(2), (torch.zeros(1), [torch.full((2, 2), 3.0)])],
    "not only tensors": lambda x, y: {"x": x, "n": 3, "text": "t", "none": None},
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structure_and_values_follow_new_inputs(structure):
    function = STRUCTURES[structure]
    model = wrap(Apply(function))
    for x, y in ((one(1), one(2)), (one(3), one(5))):
        assert_same(model(x, y), function(x, y))


def test_inputs_returned_by_a_model_with_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x):
            return x, self.fc(x)

    module = Model()
    model = wrap(module)
    for value in (1, 2):
        x, y = model(one(value))
        assert x.item() == value
        torch.testing.assert_close(y, module.fc(one(value)).detach())


def test_closure_tensor_is_returned_with_a_warning():
    outside = one(7)
    with pytest.warns(UserWarning, match="Output expected to be on the IPU but is on cpu"):
        result = wrap(Apply(lambda: [outside]))()
    assert_same(result, [outside])
    assert result[0] is not outside


def test_results_of_a_device_computation_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(Apply(lambda x: (x, x + 1, torch.ones(1))))(one(1))


def test_tensor_that_is_no_buffer_starts_anew_in_every_call():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.i = torch.tensor([0.0])

        def forward(self):
            self.i += 1
            return self.i

    module = Counter()
    model = wrap(module)
    assert [model().item(), model().item()] == [1, 1]
    assert module.i.item() == 0


def _whole(table, x):
    table += x


def _row(table, x):
    table[0] = x[1]


def _kept_view(table, x):
    row = table[1]
    table += 1
    row.mul_(x[0])


def _transposed(table, x):
    table.t()[0].add_(x[:, 0])


@pytest.mark.parametrize("write", [_whole, _row, _kept_view, _transposed])
def test_writes_to_a_tensor_from_outside_count_within_the_call(write):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.ones(2, 2)

        def forward(self, x):
            write(self.table, x)
            return self.table, self.table * 2

    module = Model()
    model = wrap(module)
    for x in (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])):
        assert_same(model(x), Model()(x))
    assert torch.equal(module.table, torch.ones(2, 2))


def test_buffer_counts_from_call_to_call():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("i", torch.tensor([1.0]))

        def forward(self):
            self.i += 1
            return self.i

    module = Counter()
    model = wrap(module)
    assert [model().item() for _ in range(4)] == [2, 3, 4, 5]
    assert module.i.item() == 1
    model.copyWeightsToHost()
    assert module.i.item() == 5


@pytest.mark.parametrize("pick", [0, 1], ids=["output", "loss"])
def test_backward_of_a_result_is_refused(pick):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x):
            y = self.fc(x)
            return y, poptorch.identity_loss(y, "mean")

    training = poptorch.trainingModel(Model(), poptorch.Options().engine("eager"))
    with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
        training(one(1))[pick].backward()


def test_branch_that_asks_where_it_runs():
    module = Apply(lambda x, y: x + y if poptorch.isRunningOnIpu() else x * y)
    assert wrap(module)(one(50), one(2)).item() == 52
    assert module(one(50), one(2)).item() == 100
