"""A wide step computes for each micro-batch what the narrow one does, and the mean of their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import poptorch
from models import Regression
from poptorch.capture import Call
from poptorch.capture.record import capture_training
from poptorch.compiler.passes import run_passes
from poptorch.compiler.wide import CannotWiden, widen
from poptorch.compiler.wide.rules import RULES as RULES_OF_OPS
from poptorch.compiler.wide.rules import of_one_shape
from poptorch.ir import OutputRole, StepGraph, verify
from poptorch.ir.python import as_function
from poptorch.optim.plan import plan_optimizers
from poptorch.options import resolve
from poptorch.structure import flatten

aten = torch.ops.aten


class Applied(nn.Module):
    """A function of rows and two weights, and the mean of its squares."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function = function
        self.w = nn.Parameter(torch.randn(4, 6, generator=generator))
        self.v = nn.Parameter(torch.randn(6, generator=generator))

    def forward(self, x):
        y = self.function(x, self.w, self.v)
        loss = y.float().pow(2).mean() + self.v.sum() * 0.1
        return y, poptorch.identity_loss(loss, reduction="none")


def narrow_step(module: nn.Module, *rows: torch.Tensor) -> StepGraph:
    """The step of one micro-batch."""
    options = resolve(poptorch.Options(), training=True)
    arguments, tensors = flatten(rows)
    keywords, _ = flatten({})
    names = tuple(f"in{index}" for index in range(len(rows)))
    plans = plan_optimizers([torch.optim.SGD(module.parameters(), lr=0.1)])
    captured = capture_training(module, Call(arguments, keywords, names, tuple(tensors)), plans, options)
    return run_passes(captured.graph, options, lambda name, graph: None)


def results(graph: StepGraph, state: dict[str, torch.Tensor], *rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a graph computes: outputs and gradients."""
    given = [state[spec.name] for spec in graph.signature.state]
    found = as_function(graph.ops)(*given, *rows)
    wanted = (OutputRole.USER_OUTPUT, OutputRole.GRADIENT)
    return {str(s): t for s, t in zip(graph.signature.outputs, found, strict=True) if s.role in wanted}


def compare(module: nn.Module, width: int, x: torch.Tensor, **tolerance: float) -> int:
    """Both forms on the same rows; gives how many ops were repeated for each micro-batch."""
    graph = narrow_step(module, x[: len(x) // width])
    widened = widen(graph, width, 1, averages=True)
    verify(widened.graph)
    state = {name: tensor.detach() for name, tensor in module.named_parameters()}
    state |= {"group0:lr": torch.tensor(0.1, dtype=torch.float64), **graph.constants}
    parts = [results(graph, state, part) for part in x.chunk(width)]
    found = results(widened.graph, state, x)
    assert found.keys() == parts[0].keys()
    for name, tensor in found.items():
        each = [part[name] for part in parts]
        if name.endswith("gradient"):
            expected = torch.stack(each).mean(0)
        else:
            expected = torch.cat(each) if each[0].dim() else torch.stack(each)
        torch.testing.assert_close(tensor, expected, **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))
    return widened.repeated


RULES: dict[str, Callable[..., torch.Tensor]] = {
    "linear": lambda x, w, v: F.linear(x, w, v[:4]),
    "linear of sequences": lambda x, w, v: F.linear(x.view(-1, 1, 6).expand(-1, 2, 6), w),
    "weights times rows": lambda x, w, v: w @ x.t(),
    "products of rows": lambda x, w, v: x @ x.t(),
    "batches of products": lambda x, w, v: x.view(-1, 2, 3) @ x.view(-1, 3, 2),
    "a shared batch of products": lambda x, w, v: torch.matmul(w.view(1, 4, 6), x.view(-1, 6, 1)),
    "pointwise": lambda x, w, v: torch.tanh(x) * v + x.sigmoid() / 3,
    "broadcast against another dimension": lambda x, w, v: x.unsqueeze(1) * w,
    "broadcast of a number": lambda x, w, v: x * x.mean() - v,
    "broadcast of a column": lambda x, w, v: x - x.mean(1, keepdim=True) * v,
    "broadcast over the rows": lambda x, w, v: x - x.mean(0) * v,
    "rows against columns": lambda x, w, v: x.unsqueeze(0) - x.unsqueeze(1) * v,
    "sums": lambda x, w, v: torch.stack([x.sum(), (x * v).sum(0).max(), x.amax((0, 1))]),
    "sums of middle dimensions": lambda x, w, v: x.view(-1, 2, 3).sum(1) * v[:3],
    "statistics": lambda x, w, v: (x - x.mean(0)) / (x.var(0) + 1).sqrt() * v,
    "softmax": lambda x, w, v: F.log_softmax(x * v, 1),
    "softmax over the rows": lambda x, w, v: F.softmax(x * v, 0),
    "layer norm": lambda x, w, v: F.layer_norm(x, (6,), v),
    "layer norm of all": lambda x, w, v: F.layer_norm(x * v, tuple(x.shape)),
    "group norm": lambda x, w, v: F.group_norm(x.view(-1, 6, 1), 2, v),
    "batch norm": lambda x, w, v: F.batch_norm(x, None, None, v, v, training=True),
    "instance norm": lambda x, w, v: F.instance_norm(x.view(-1, 2, 3) * v.view(2, 3)),
    "convolution": lambda x, w, v: F.conv1d(x.view(-1, 2, 3), w.view(4, 2, 3), v[:4], padding=1),
    "transposed convolution": lambda x, w, v: F.conv_transpose1d(x.view(-1, 2, 3), w.view(2, 4, 3)),
    "maximum pooling": lambda x, w, v: F.max_pool2d((x * v).view(-1, 1, 2, 3), (2, 1)),
    "average pooling": lambda x, w, v: F.avg_pool2d((x * v).view(-1, 1, 2, 3), (2, 1)),
    "embedding": lambda x, w, v: F.embedding((x > 0).long(), w) * v,
    "rows of a table": lambda x, w, v: w[(x > 0).long()] * v,
    "columns of a table": lambda x, w, v: w[:, (x[:, 0] > 0).long()],
    "gather": lambda x, w, v: (x * v).gather(1, (x > 0).long()),
    "gather rows": lambda x, w, v: (x * v).gather(0, torch.zeros_like(x, dtype=torch.long)),
    "views": lambda x, w, v: (x * v).view(-1, 3, 2).transpose(0, 1).flatten(1).unsqueeze(0).squeeze(0),
    "views that mix rows": lambda x, w, v: (x * v).t().reshape(3, -1),
    "permuted": lambda x, w, v: (x.view(-1, 2, 3).permute(2, 0, 1) * v[0]).contiguous(),
    "slices": lambda x, w, v: x[:, 1:3] * v[:2] + x[:, -2:],
    "slices of rows": lambda x, w, v: (x * v)[1:] - x[:1],
    "selections": lambda x, w, v: x[:, 0] * v[0] + x[:, 1],
    "a selected row": lambda x, w, v: x[0] * v,
    "concatenation": lambda x, w, v: torch.cat([x, x * v], 1),
    "concatenation of rows": lambda x, w, v: torch.cat([x, v.unsqueeze(0) * 2, x[:1]], 0),
    "concatenation with a weight": lambda x, w, v: torch.cat([x, v.expand(len(x), 6)], 1),
    "pieces": lambda x, w, v: sum(part.tanh() for part in (x * v).split(2, 1)),
    "pieces of rows": lambda x, w, v: torch.cat([p * i for i, p in enumerate((x * v).split(1, 0))], 1),
    "expanded": lambda x, w, v: (x[:, :1].expand(-1, 6) * v) + x.unsqueeze(1).expand(-1, 3, 6).sum(1),
    "padding": lambda x, w, v: F.pad(x * v, (1, 2)),
    "padding of rows": lambda x, w, v: F.pad(x * v, (0, 0, 1, 1)),
    "sorted": lambda x, w, v: (x * v).sort(1).values,
    "sorted rows": lambda x, w, v: (x * v).sort(0).values,
    "largest": lambda x, w, v: (x * v).topk(2, 1).values.sum(1) + (x * v).max(1).values,
    "running sums": lambda x, w, v: (x * v).cumsum(0) + (x * v).cumsum(1),
    "attention": lambda x, w, v: F.scaled_dot_product_attention(*[(x * v).view(-1, 1, 2, 3)] * 3),
    "masked": lambda x, w, v: (x * v).masked_fill(x > 0, 0.5).where(x < 1, v),
    "half": lambda x, w, v: (x.half() * v.half()).relu(),
    "written in place": lambda x, w, v: (x * v).index_copy(0, torch.tensor([0]), v.unsqueeze(0)),
    "cross entropy": lambda x, w, v: F.cross_entropy(x * v, (x[:, 0] > 0).long(), reduction="none"),
    "mean of cross entropies": lambda x, w, v: F.cross_entropy(x * v, (x[:, 0] > 0).long(), ignore_index=7),
    "sum of cross entropies": lambda x, w, v: F.cross_entropy(x * v, (x[:, 0] > 0).long(), reduction="sum"),
    "mean of squares": lambda x, w, v: F.mse_loss(x * v, x.flip(1)),
    "other losses": lambda x, w, v: (
        F.smooth_l1_loss(x * v, x) + F.kl_div(F.log_softmax(x * v, 1), F.softmax(x, 1), reduction="batchmean")
    ),
    "a gradient of weights alone": lambda x, w, v: x @ (w.t() @ w),
}


@pytest.mark.parametrize("function", RULES.values(), ids=RULES)
@settings(max_examples=2, deadline=None)
@given(width=st.integers(2, 5), rows=st.integers(2, 4), seed=st.integers(0, 99))
def test_every_rule_gives_what_single_micro_batches_give(function, width: int, rows: int, seed: int) -> None:
    x = torch.randn(width * rows, 6, generator=torch.Generator().manual_seed(seed))
    loose = {"rtol": 1e-2, "atol": 1e-2} if function is RULES["half"] else {}
    assert compare(Applied(function), width, x, **loose) == 0, "an op was repeated for each micro-batch"


def test_an_op_that_nothing_is_known_about_is_repeated() -> None:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))

    def function(x, w, v):
        return F.conv1d(x.view(1, -1, 6) * v, x.view(1, -1, 6))  # by a kernel that differs between micro-batches

    assert compare(Applied(function), 4, x) > 0


def test_a_widened_linear_step(golden) -> None:
    torch.manual_seed(0)
    graph = narrow_step(Regression(), torch.ones(2, 3), torch.ones(2, 2))
    golden.check(str(widen(graph, 4, 2, averages=True).graph))


def test_the_gradient_of_a_weight_is_one_product_over_all_rows() -> None:
    graph = widen(narrow_step(Regression(), torch.ones(2, 3), torch.ones(2, 2)), 4, 1, averages=True).graph
    targets = [node.target for node in graph.ops.nodes]
    assert targets.count(aten.mm.default) == 1
    assert aten.bmm.default not in targets


class Reading(nn.Module):
    """Its result depends on what the micro-batch before has left in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen += x.sum(0)
        return poptorch.identity_loss((x * self.w * self.seen).sum(), reduction="none")


def test_a_buffer_that_is_read_after_it_was_written_keeps_micro_batches_apart() -> None:
    with pytest.raises(CannotWiden, match="into a buffer"):
        widen(narrow_step(Reading(), torch.ones(2, 3)), 2, 1, averages=True)


def test_draws_that_depend_on_data_keep_micro_batches_apart() -> None:
    graph = narrow_step(Applied(lambda x, w, v: torch.bernoulli(x.sigmoid()) * v), torch.ones(2, 6))
    with pytest.raises(CannotWiden, match="depend on data"):
        widen(graph, 2, 1, averages=True)


class Averaged(Applied):
    """The mean of the function itself, so that the gradient there is the same for all micro-batches."""

    def forward(self, x):
        y = self.function(x, self.w, self.v)
        return y, poptorch.identity_loss(y.mean(), reduction="none")


@pytest.mark.parametrize("function", [F.gelu, F.logsigmoid, F.silu, F.softplus])
@pytest.mark.parametrize("rows", [lambda x, v: x * v, lambda x, v: (x * v)[:, None]], ids=["rows", "a dimension more"])
def test_a_gradient_that_all_micro_batches_share_meets_values_of_their_own(function, rows) -> None:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    assert compare(Averaged(lambda x, w, v: function(rows(x, v))), 4, x) == 0


def known_arguments(op, tensors) -> list | None:
    """Arguments for a call of an op; None if it needs others than tensors and numbers."""
    numbers = {"number": 0.5, "float": 0.5, "int": 1, "bool": False}
    types = [str(each.type) for each in op._schema.arguments if not each.has_default_value()]
    if any(kind not in numbers and kind != "Tensor" for kind in types):
        return None
    given = iter(tensors)
    return [next(given, None) if kind == "Tensor" else numbers[kind] for kind in types]


def elementwise_ops() -> list:
    """All ops of PyTorch's that compute each element by itself, from tensors and numbers."""
    packets = [getattr(aten, name) for name in dir(aten)]
    ops = [getattr(packet, name) for packet in packets if hasattr(packet, "overloads") for name in packet.overloads()]
    ops = [op for op in ops if torch.Tag.pointwise in op.tags and not op._schema.is_mutable]
    return [op for op in ops if known_arguments(op, []) is not None and RULES_OF_OPS.get(op) is not of_one_shape]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_elementwise_ops_repeat_tensors_of_all_micro_batches(dtype) -> None:
    """What the rule for them relies on; those that cannot are in a list, and get tensors of one shape."""
    generator = torch.Generator().manual_seed(0)
    one, many = ((torch.rand(shape, generator=generator) * 4).to(dtype) + 1 for shape in ((8, 4), (3, 8, 4)))
    compared = 0
    for op in elementwise_ops():
        count = sum(str(argument.type) == "Tensor" for argument in op._schema.arguments)
        for place in range(count if count > 1 else 0):
            tensors = [one if index == place else many for index in range(count)]
            try:
                expected = op(*known_arguments(op, [tensor.expand(3, 8, 4).contiguous() for tensor in tensors]))
            except (RuntimeError, NotImplementedError):
                continue  # not for this type
            torch.testing.assert_close(op(*known_arguments(op, tensors)), expected, equal_nan=True, msg=str(op))
            compared += 1
    assert compared > 100
