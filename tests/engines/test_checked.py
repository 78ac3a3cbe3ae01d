"""Floating-point exceptions: which ops raise, which infinities are welcome, and what a failed step leaves behind."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Apply, Regression

INF, NAN = float("inf"), float("nan")


def checked(enabled: bool | None = True) -> poptorch.Options:
    options = poptorch.Options().engine("eager")
    if enabled is not None:
        options.Precision.enableFloatingPointExceptions(enabled)
    return options


def run(function, *values: float, enabled: bool | None = True):
    return poptorch.inferenceModel(Apply(function), checked(enabled))(*(torch.tensor([1.0, v]) for v in values))


EXCEPTIONAL = {
    "one over zero": (lambda x: 1 / x, (0.0,)),
    "zero over zero": (lambda x: x / x, (0.0,)),
    "division by zero": (lambda x, y: x / y, (2.0, 0.0)),
    "division by infinity": (lambda x, y: x / y, (2.0, INF)),
    "zero times infinity": (lambda x, y: x * y, (0.0, INF)),
    "infinity minus infinity": (lambda x, y: x - y, (INF, INF)),
    "square root of -1": (torch.sqrt, (-1.0,)),
    "logarithm of zero": (torch.log, (0.0,)),
    "comparison with NaN": (lambda x: x > 0, (NAN,)),
    "overflow": (torch.exp, (3800.0,)),
    "overflow of float16": (lambda x: x.half(), (70000.0,)),
}


@pytest.mark.parametrize("name", EXCEPTIONAL)
def test_exceptional_op_raises(name):
    function, values = EXCEPTIONAL[name]
    with pytest.raises(poptorch.Error, match="floating-point exception in") as caught:
        run(function, *values)
    assert isinstance(caught.value, FloatingPointError)


@pytest.mark.parametrize("enabled", [False, None])
@pytest.mark.parametrize("name", EXCEPTIONAL)
def test_without_the_option_nothing_raises(name, enabled):
    function, values = EXCEPTIONAL[name]
    run(function, *values, enabled=enabled)


ORDINARY = {
    "mask": lambda x: torch.softmax(x.masked_fill(x > 1, -INF), 0),
    "added mask": lambda x: torch.softmax(x + torch.tensor([0.0, -INF]), 0),
    "infinite factory": lambda x: torch.minimum(x, torch.full((2,), INF)),
    "infinity in the data": lambda x: x + torch.tensor([INF, NAN]),
    "is it NaN": lambda x: torch.isnan(x + torch.tensor([INF, NAN])),
    "is it finite": lambda x: torch.isfinite(x + torch.tensor([INF, NAN])),
    "memory without values": lambda x: torch.empty(1000).fill_(1.0) * x.sum(),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_the_user_brought_is_no_exception(name):
    run(ORDINARY[name], 2.0)


def test_message_names_the_op_the_line_and_the_way_out():
    with pytest.raises(poptorch.Error) as caught:
        run(lambda x: torch.sqrt(x), -1.0)
    text = str(caught.value)
    assert "sqrt of the forward pass: its result has NaN, and no operand has" in text
    assert "test_checked.py" in text
    assert "run(lambda x: torch.sqrt(x), -1.0)" in text
    assert "enableFloatingPointExceptions off" in text


def test_chosen_engine_does_not_switch_checks_off():
    with pytest.raises(poptorch.Error, match="divides by zero"):
        poptorch.inferenceModel(Apply(lambda x: 1 / x), checked().engine("inductor"))(torch.zeros(1))


def test_what_depends_on_weights_alone_is_checked_whenever_weights_are_taken_over():
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x + 1 / self.weight

    module = Inverse()
    model = poptorch.inferenceModel(module, checked())
    assert model(torch.ones(2)).tolist() == [2, 2]
    module.weight.data.zero_()
    for attempt in (model.copyWeightsToDevice, lambda: model(torch.ones(2))):
        with pytest.raises(poptorch.Error, match="reciprocal of the forward pass"):
            attempt()
    module.weight.data.fill_(2.0)
    assert model(torch.ones(2)).tolist() == [1.5, 1.5]


class Root(nn.Module):
    """The root of a distance: its gradient divides by zero where the distance is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        seen = self.norm(x).detach() * 0
        return poptorch.identity_loss(torch.sqrt((x - self.bias).abs() + seen), reduction="mean")


@pytest.mark.parametrize("steps", [1, 2])
def test_exception_of_the_backward_pass_leaves_everything_as_it_was(steps):
    torch.manual_seed(0)
    good, model = torch.randn(4 * steps, 2) + 4, Root()
    twin = copy.deepcopy(model)
    states = []
    for module, sees_a_bad_batch in ((model, True), (twin, False)):
        options = checked()
        options.Training.gradientAccumulation(steps)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        training = poptorch.trainingModel(module, options, optimizer)
        training(good)
        if sees_a_bad_batch:
            bad = good.clone()
            bad[-1] = module.bias.detach()  # in the last micro-batch
            with pytest.raises(poptorch.Error, match="of the backward pass"):
                training(bad)
        training(good)
        states.append({**module.state_dict(), **dict(enumerate(optimizer.state_dict()["state"].values()))})
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize("steps", [1, 2])
def test_overflow_of_the_update_leaves_everything_as_it_was(steps):
    options = checked()
    options.Training.gradientAccumulation(steps)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    training = poptorch.trainingModel(model, options, optimizer)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(poptorch.Error, match="of the update pass"):
            training(torch.full((2 * steps, 3), 1e12), torch.zeros(2 * steps, 2))
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_checked_training_gives_the_same_weights():
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    model = Regression()
    twin = copy.deepcopy(model)
    for module, enabled in ((model, True), (twin, False)):
        training = poptorch.trainingModel(module, checked(enabled), torch.optim.Adam(module.parameters(), lr=0.1))
        for _ in range(3):
            training(x, y)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


def test_layers_of_many_kinds_pass_the_checks():
    class Zoo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
            self.embedding = nn.EmbeddingBag(5, 4)
            self.conv = nn.Conv1d(4, 4, 3, padding=1)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x, tokens):
            h, _ = self.lstm(x)
            h, _ = self.attention(h, h, h, attn_mask=nn.Transformer.generate_square_subsequent_mask(5))
            h = F.max_pool1d(self.norm(self.conv(h.transpose(1, 2))).relu(), 2).mean(-1)
            aligned = F.ctc_loss(F.log_softmax(x, -1).transpose(0, 1), tokens[:, :1] % 3 + 1, (5, 5), (1, 1))
            loss = F.cross_entropy(h + self.embedding(tokens), tokens[:, 0] % 4)
            return poptorch.identity_loss(loss + aligned, reduction="none")

    model = Zoo()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, checked(), optimizer)
    losses = [training(torch.randn(2, 5, 4), torch.tensor([[0, 1], [2, 4]])) for _ in range(3)]
    assert torch.stack(losses).isfinite().all()


def test_prints_nops_and_products_in_pieces_are_checked_too(capfd):
    class Model(nn.Module):
        def forward(self, x):
            product = poptorch.serializedMatMul(x, x, poptorch.MatMulSerializationMode.ReducingDim, 2)
            return poptorch.nop(poptorch.ipu_print_tensor(product, "p")).log()

    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(True)
    model = poptorch.inferenceModel(Model(), options)
    assert torch.equal(model(torch.eye(2) + 1), (torch.eye(2) + 1).matmul(torch.eye(2) + 1).log())
    with pytest.raises(poptorch.Error, match="floating-point exception in log"):
        model(torch.zeros(2, 2))
    assert capfd.readouterr().err.count("p: (") == 2
