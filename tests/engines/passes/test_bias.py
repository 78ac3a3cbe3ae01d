"""Biases are added by the code that reads a product next, if there is such code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from poptorch.engines.passes.bias import add_bias_last, add_biases_last
from poptorch.ir.python import as_function
from rewrites import after as rewritten
from rewrites import changes, targets


def test_the_sum_is_that_of_addmm():
    bias, a, b = (torch.randn(shape, dtype=torch.float64) for shape in ((4,), (2, 3), (3, 4)))
    torch.testing.assert_close(add_bias_last(bias, a, b), torch.addmm(bias, a, b))


class Layer(nn.Module):
    def __init__(self, after) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.after = after

    def forward(self, x):
        return self.after(self.fc(x))


def count(after) -> int:
    """How many biases of a layer with something after it are added last."""
    executor = poptorch.inferenceModel(Layer(after), poptorch.Options().engine("eager"))
    executor(torch.randn(2, 5, 3))
    return targets(rewritten(executor, add_biases_last)).count(torch.ops.aten.mm.default)


def product_of_parts(y):
    first, second = y.chunk(2, -1)
    return first @ second.mT


READ_BY_CODE = {
    "pointwise": F.gelu,
    "through a view": lambda y: y.transpose(1, 2).relu(),
    "reduction": lambda y: y.sum(-1),
    "and returned": lambda y: (y, y.exp()),
}
READ_BY_KERNELS = {
    "returned": lambda y: y,
    "another product": lambda y: y @ y.mT,
    "attention": lambda y: F.scaled_dot_product_attention(*(y[:, None],) * 3),
    "product of parts": product_of_parts,
}


@pytest.mark.parametrize("after", READ_BY_CODE.values(), ids=READ_BY_CODE)
def test_code_adds_the_bias(after):
    assert count(after) == 1


@pytest.mark.parametrize("after", READ_BY_KERNELS.values(), ids=READ_BY_KERNELS)
def test_kernels_do_not(after):
    assert count(after) == 0


def test_a_matrix_that_is_added_is_not_a_bias():
    class Sum(nn.Module):
        def forward(self, x, y):
            return torch.addmm(x, x, y).relu(), torch.addmm(x[0], x, y, beta=2).relu()

    executor = poptorch.inferenceModel(Sum(), poptorch.Options().engine("eager"))
    executor(torch.randn(3, 3), torch.randn(3, 3))
    assert not changes(executor, add_biases_last)


class Products(nn.Module):
    """A product of what two layers that are alike give, and the product of one with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        squared, mixed = torch.addmm(self.bias, a, a), torch.addmm(self.bias, a, b)
        return squared.tanh(), mixed.tanh(), a.tanh() + b.sin()


def test_layers_that_are_alike_keep_their_own_operands():
    executor = poptorch.inferenceModel(Products(), poptorch.Options().engine("eager"))
    x = torch.randn(4, 4)
    expected = executor(x)
    assert changes(executor, add_biases_last)
    graph, state = rewritten(executor, add_biases_last), dict(executor.named_parameters())
    found = as_function(graph.ops, "step")(*(state.get(spec.name, x) for spec in graph.signature.inputs))
    torch.testing.assert_close(tuple(found), expected)
