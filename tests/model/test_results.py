"""What a call returns: structure, rows, types, and what changed in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from model.executors import batch, infer, options, sgd, train
from models import Regression


def test_backward_of_a_result_is_refused():
    out, loss = train(Regression())(*batch())
    for result in (out, loss):
        with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
            result.backward()


def test_results_are_fresh_and_without_history():
    training = train(Regression())
    first = training(*batch())
    values = [result.clone() for result in first]
    second = training(*batch(seed=1))
    assert all(not result.requires_grad for result in (*first, *second))
    assert all(torch.equal(result, value) for result, value in zip(first, values, strict=True))


def test_the_first_loss_is_that_of_the_initial_weights():
    model = Regression()
    x, target = batch()
    expected = model(x, target)[1].detach()
    torch.testing.assert_close(train(model)(x, target)[1], expected)


class Structured(nn.Module):
    def forward(self, x):
        y = x + 1
        return {"b": [y, (y * 2, None)], "a": "text", "x": x, "n": 3}


def test_structure_of_the_result_is_that_of_forward():
    model = infer(Structured())
    for value in (1.0, 5.0):
        x = torch.tensor([value])
        result, expected = model(x), Structured()(x)
        assert list(result) == list(expected)
        assert isinstance(result["b"], list)
        assert isinstance(result["b"][1], tuple)
        assert (result["a"], result["n"], result["b"][1][1]) == ("text", 3, None)
        assert torch.equal(result["b"][0], expected["b"][0])
        assert torch.equal(result["b"][1][0], expected["b"][1][0])
        assert torch.equal(result["x"], x)


def test_a_returned_input_does_not_alias_the_callers_tensor():
    x = torch.tensor([1.0])
    returned = infer(Structured())(x)["x"]
    returned.add_(1)
    assert x.item() == 1


def test_64_bit_results_come_back_narrow():
    class Wide(nn.Module):
        def forward(self, x, i):
            return x.double(), i, i + 1

    results = infer(Wide())(torch.ones(2), torch.tensor([1, 2]))
    assert [result.dtype for result in results] == [torch.float32, torch.int32, torch.int32]


class InPlace(nn.Module):
    def forward(self, x):
        x += 1


def test_in_place_change_of_an_input_reaches_the_caller():
    model = infer(InPlace())
    x = torch.tensor([1.0])
    assert model(x) is None
    assert x.item() == 2
    model(x)
    assert x.item() == 3
    other = torch.tensor([10.0])
    model(other)
    assert (x.item(), other.item()) == (3, 11)


def test_in_place_change_of_every_micro_batch_reaches_the_caller():
    x = torch.arange(4.0)
    infer(InPlace(), D=2, R=2)(x)
    assert torch.equal(x, torch.arange(4.0) + 1)


# D, G, R, mode, period → copies, for two rows per micro-batch
MODES = [
    (4, 2, 1, poptorch.OutputMode.All, None),
    (4, 2, 1, poptorch.OutputMode.EveryN, 2),
    (4, 2, 2, poptorch.OutputMode.Final, None),
    (4, 2, 2, poptorch.OutputMode.Sum, None),
    (4, 2, 2, poptorch.OutputMode.EveryN, 2),
    (1, 1, 1, poptorch.OutputMode.All, None),
]


class Echo(nn.Module):
    """Returns its input, and a loss that is the sum of it: results show which rows they come from."""

    def __init__(self):
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        y = x + self.zero * 0
        return y, poptorch.identity_loss(y, "sum"), torch.ones(3)


@pytest.mark.parametrize(("d", "g", "r", "mode", "period"), MODES)
def test_output_modes_return_the_right_rows(d, g, r, mode, period):
    made = options(D=d, G=g, R=r).outputMode(mode, period)
    model = Echo()
    rows = torch.arange(2.0 * d * g * r)
    out, loss, constant = poptorch.trainingModel(model, made, sgd(model))(rows)
    parts = rows.reshape(d, g, r, 2)
    expected = {
        poptorch.OutputMode.All: lambda: parts,
        poptorch.OutputMode.EveryN: lambda: parts[period - 1 :: period],
        poptorch.OutputMode.Final: lambda: parts[-1:, -1:],
        poptorch.OutputMode.Sum: lambda: parts.sum((0, 1), keepdim=True),
    }[mode]()
    assert torch.equal(out, expected.reshape(-1))
    losses = expected.sum(-1).reshape(-1)
    assert torch.equal(loss, losses if losses.numel() > 1 else losses[0])
    assert torch.equal(constant, torch.ones(3))
