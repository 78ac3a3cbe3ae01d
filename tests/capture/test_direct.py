"""Ops that are recorded at once become what they become when all modes of PyTorch see them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import poptorch
from models import Apply
from poptorch.capture import direct, record
from poptorch.ir import value_of


def described(graph):
    """A graph with all that is known about its values, and which of them share memory."""
    memory, lines = {}, [str(graph)]
    for node in graph.ops.nodes:
        values = value_of(node)
        for value in values if isinstance(values, (tuple, list)) else [values]:
            if isinstance(value, torch.Tensor):
                number = memory.setdefault(value.untyped_storage()._cdata, len(memory))
                layout = value.stride(), value.storage_offset(), value.dtype, value.requires_grad
                lines.append(f"{node.name} {layout} {type(value).__name__} {value.device} memory {number}")
    return "\n".join(lines)


@pytest.fixture
def capture(monkeypatch):
    """The graph of a model, and how many of its ops were recorded directly."""

    def capture(make, *args, training=False, directly=True):
        found, counts = [], [0]
        name = "capture_training" if training else "capture_inference"
        original, see = getattr(record, name), direct.Direct.record

        def remember(*given):
            found.append(original(*given))
            return found[-1]

        def count(self, seen, note):
            result = see(self, seen, note) if directly else NotImplemented
            counts[0] += result is not NotImplemented
            return result

        with monkeypatch.context() as patch:
            patch.setattr(record, name, remember)
            patch.setattr(direct.Direct, "record", count)
            torch.manual_seed(0)
            model, options = make(), poptorch.Options().engine("eager")
            if training:
                poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))(*args)
            else:
                poptorch.inferenceModel(model, options)(*args)
        return described(found[0].graph), counts[0]

    return capture


def plain(x):
    for _ in range(3):
        x = F.gelu(x @ x.t()).softmax(-1) @ x
    return x


def written_after_a_view(x):
    y = x * 1
    for index in range(4):
        y[index % 2].add_(1)
        y = y + y.t().t() * y[index % 2]
    return y


def seen_through_another_view(x):
    total = x.sum()
    for _ in range(3):
        y = x * 2
        row, column = y[0], y[:, 1]
        row.mul_(3)
        total = total + column.sum() + row.sum() + y.sum()
    return total


def changed_in_place(x):
    for _ in range(3):
        x = F.relu(x * 2, inplace=True) + 1
        x.t_().transpose_(0, 1)
        x = x.contiguous().squeeze_() + 1
    return x


def of_other_strides(x):
    return [y * 2 for y in (x, x.t(), x[::2], x.expand(2, *x.shape), x[:0], x.clone(), x.t(), x[:0], x[::2])]


def of_other_types(x):
    whole = x.to(torch.int32)
    return [whole + constant for constant in (1, 1.0, True, 1, 1.0, True)] + [x / 2, x.half() / 2, x / 2, x.half() / 2]


def with_conjugates(x):
    z = torch.complex(x, x + 1)
    for _ in range(3):
        z = z.conj() * z + z.real + z.conj().imag
    return torch.view_as_real(z)


def of_several_results(x):
    for _ in range(3):
        top, _index = x.topk(2)
        mean = torch.var_mean(x, 1)[1]
        x = F.layer_norm(x, x.shape[-1:]) + top.sum() + mean.sum() + torch.cat([x, x], 1)[:, :4]
    return x


def transformed(x):
    for _ in range(2):
        x = x + torch.func.vmap(lambda row: row.sin() * row.sum())(x)
        x = x + torch.func.grad(lambda z: (z * z).sum())(x)
    return x


def from_constants(x):
    table = torch.arange(4.0)
    for _ in range(3):
        x = x + table.view(1, 4) * torch.tensor(2.0) + torch.ones(4)
    return x


def in_inference_mode(x):
    for _ in range(2):
        with torch.inference_mode():
            y = (x * 2).t() + 1
        x = x * 2 + y.t()
    return x


def with_a_mode_of_the_users(x):
    from torch.utils.flop_counter import FlopCounterMode

    x = x @ x
    with FlopCounterMode(display=False) as counter:
        x = x @ x @ x @ x
    return x * counter.get_total_flops()


FUNCTIONS = [
    plain,
    written_after_a_view,
    seen_through_another_view,
    changed_in_place,
    of_other_strides,
    of_other_types,
    with_conjugates,
    of_several_results,
    transformed,
    from_constants,
    in_inference_mode,
    with_a_mode_of_the_users,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_graph_is_the_same_if_all_modes_see_every_op(capture, function):
    x = torch.rand(4, 4)
    usual, none = capture(lambda: Apply(function), x, directly=False)
    quick, some = capture(lambda: Apply(function), x)
    assert none == 0
    assert some > 0
    assert quick == usual


def test_a_branch_on_a_value_is_traced_with_values(capture):
    def branch(x):
        y = x @ x @ x
        return y * 2 if y.sum() > 0 else y

    usual, _ = capture(lambda: Apply(branch), torch.rand(4, 4), directly=False)
    quick, _ = capture(lambda: Apply(branch), torch.rand(4, 4))
    assert quick == usual


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)), inplace=True) + x
        with torch.no_grad():
            scale = x.mean((2, 3), keepdim=True)
        return self.frozen(F.dropout(x * scale, 0.1)) + x.detach()


class Layers(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.again = again

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return F.mse_loss(x, torch.zeros_like(x))


@pytest.mark.parametrize("again", [False, True], ids=["once", "with activation checkpointing"])
def test_a_training_step_is_the_same_if_all_modes_see_every_op(capture, again):
    x = torch.rand(2, 4, 6, 6)
    usual, _ = capture(lambda: Layers(again), x, training=True, directly=False)
    quick, some = capture(lambda: Layers(again), x, training=True)
    assert some > 20
    assert quick == usual
