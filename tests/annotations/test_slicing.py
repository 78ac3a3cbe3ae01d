"""dynamic_slice and dynamic_update: on the host, and in a compiled model for starts that differ from call to call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def compiled(function, engine="eager"):
    return poptorch.inferenceModel(Model(function), poptorch.Options().engine(engine))


@pytest.mark.inductor
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_slice_starts_where_a_tensor_says(step, engine):
    model = compiled(lambda x, start: poptorch.dynamic_slice(x, 0, start, 4, step), engine)
    x = torch.rand(8, 2)
    for start in (0, 1, 4):  # the first one compiles
        assert torch.equal(model(x, torch.tensor([start])), x[start : start + 4 : step])


def test_the_start_may_be_computed():
    model = compiled(lambda x, start: poptorch.dynamic_slice(x, 1, (start + 2).sum() - 1, 1, 1))
    x = torch.rand(3, 4)
    for start in (0, 2):
        assert torch.equal(model(x, torch.tensor([start])), x[:, start + 1 : start + 2])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_the_host_slices_as_pytorch_does(dtype):
    x, start = torch.rand(8), torch.tensor([1], dtype=dtype)
    assert torch.equal(poptorch.dynamic_slice(x, 0, start, 4, 3), x[1:5:3])
    assert torch.equal(poptorch.dynamic_update(x, x[:2], 0, start, 2), torch.cat([x[:1], x[:2], x[3:]]))


@pytest.mark.inductor
def test_a_slice_beyond_the_end_goes_on_at_the_beginning(engine):
    model = compiled(lambda x, start: poptorch.dynamic_slice(x, 0, start, 4, 1), engine)
    assert model(torch.arange(8.0), torch.tensor([6])).tolist() == [6, 7, 0, 1]


@pytest.mark.parametrize(
    ("size", "step", "text"),
    [
        (0, 1, "must be different"),
        (-2, 1, "end less than the start"),
        (7, 1, r"\(7\) must be a factor of the slicing dimension \(8\)"),
        (4, 0, "step is 0"),
    ],
)
def test_sizes_and_steps_that_are_refused(size, step, text):
    model = compiled(lambda x, start: poptorch.dynamic_slice(x, 0, start, size, step))
    with pytest.raises(poptorch.Error, match=text) as raised:
        model(torch.rand(8), torch.tensor([1]))
    assert "test_slicing.py" in str(raised.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ([1.0], 0, torch.tensor(1), 1, 1),
        (torch.ones(4), 0, 1, 1, 1),
        (torch.ones(4), 0.0, torch.tensor(1), 1, 1),
        (torch.ones(4), 0, torch.tensor(1), 1.0, 1),
        (torch.ones(4), 0, torch.tensor(1), 1, None),
        (torch.ones(4), 1, torch.tensor(1), 1, 1),
        (torch.ones(4), 0, torch.tensor([1, 2]), 1, 1),
        (torch.ones(4), 0, torch.tensor(1.0), 1, 1),
    ],
)
def test_arguments_of_other_types(arguments):
    with pytest.raises(poptorch.Error, match=r"poptorch\.dynamic_slice\(\): \w+ "):
        poptorch.dynamic_slice(*arguments)


def test_a_slice_is_differentiated():
    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, start):
            return poptorch.identity_loss(poptorch.dynamic_slice(self.weight, 0, start, 4, 1), "sum")

    model = Trained()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    training(torch.tensor([3]))
    assert model.weight.tolist() == [1, 1, 1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("shape", "dim", "size"),
    [
        ((8,), 0, 1),
        ((8,), 0, 4),
        ((3,), 0, 2),
        ((4, 3), 0, 2),
        ((4, 3), 1, 1),
        ((2, 3, 4), 0, 1),
        ((2, 3, 4), 2, 3),
        ((2, 3, 4), -2, 2),
    ],
)
def test_an_update_is_a_slice_assignment(shape, dim, size):
    model = compiled(lambda x, src, start: poptorch.dynamic_update(x, src, dim, start, size))
    x = torch.rand(shape)
    src = torch.rand([size if index == dim % len(shape) else length for index, length in enumerate(shape)])
    for start in (0, 1):
        expected = x.clone()
        expected.narrow(dim, start, size).copy_(src)
        assert torch.equal(model(x, src, torch.tensor([start])), expected)
        assert torch.equal(poptorch.dynamic_update(x, src, dim, torch.tensor([start]), size), expected)


@pytest.mark.inductor
def test_an_update_beyond_the_end_goes_on_at_the_beginning(engine):
    model = compiled(lambda x, src, start: poptorch.dynamic_update(x, src, 0, start, 3), engine)
    assert model(torch.zeros(4), torch.arange(1.0, 4.0), torch.tensor([2])).tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize(
    ("src", "size", "text"),
    [
        (torch.ones(0, 3), 0, "must be different"),
        (torch.ones(1, 3), -1, "end less than the start"),
        (torch.ones(3), 2, r"input and src tensors must have same dimensionality\. \(2\) vs \(1\)"),
        (torch.ones(2, 3, dtype=torch.int32), 2, r"must have same dtype\. \(torch\.float32 vs torch\.int32\)"),
        (torch.ones(1, 3), 2, r"src has shape \[1, 3\], and the slice \[2, 3\]"),
    ],
)
def test_updates_that_are_refused(src, size, text):
    model = compiled(lambda x, start: poptorch.dynamic_update(x, src, 0, start, size))
    with pytest.raises(poptorch.Error, match=text):
        model(torch.rand(4, 3), torch.tensor([1]))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_bounds_that_are_python_numbers_in_training(step):
    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(8.0))

        def forward(self, y):
            part = self.weight[len(self.weight) // 2 : len(self.weight) - 1 : step] + y
            return part, poptorch.identity_loss(part, "sum")

    model, y = Trained(), torch.ones(1)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    assert torch.equal(training(y)[0], torch.arange(8.0)[4:7:step] + 1)
    expected = torch.arange(8.0)
    expected[4:7:step] -= 1
    assert torch.equal(model.weight, expected)


@pytest.mark.filterwarnings("ignore")
def test_bounds_that_are_tensors_are_frozen_and_guarded():
    model = compiled(lambda x, start: x[start : start + 4])
    x = torch.arange(8.0)
    assert torch.equal(model(x, torch.tensor([1])), x[1:5])
    assert torch.equal(model(x + 1, torch.tensor([1])), x[1:5] + 1)
    with pytest.raises(poptorch.Error, match="contradicts the value 1"):
        model(x, torch.tensor([2]))


def test_an_index_tensor_is_dynamic():
    model = compiled(lambda x, places: x[places])
    x = torch.arange(8.0)
    for places in ([1, 2], [5, 3]):
        assert torch.equal(model(x, torch.tensor(places)), x[places])
