"""`NameScope` and `Attribute`: what they say about operations."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import poptorch
from poptorch.annotations.scopes import ATTRIBUTES
from poptorch.ir import hint_of


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.inner = function, Inner()

    def forward(self, *args):
        return self.function(self, *args)


class Inner(nn.Module):
    def forward(self, x):
        with poptorch.NameScope("deep"):
            return torch.exp(x)


def compiled(function, *args, options=None):
    model = poptorch.inferenceModel(Model(function), options)
    model(*args)
    return model


def attributes(model):
    nodes = [node for node in model._executable.step.graph.ops.nodes if node.op == "call_function"]
    return {str(node.target): hint_of(node, ATTRIBUTES) for node in nodes}


def test_a_name_scope_is_in_front_of_names():
    def forward(model, x, y):
        with poptorch.NameScope("NameScope"):
            z = x + y
        return z * 2

    model = compiled(forward, torch.ones(1), torch.ones(1))
    names = model.getTensorNames()
    assert "NameScope/Add:0" in names
    assert "Mul:0" in names
    assert "[scope NameScope]" in str(model._executable.step.graph)
    ops = json.loads(model._debugGetPopartIR())["maingraph"]
    assert [op["name"] for op in ops] == ["NameScope/Add", "Mul"]


@pytest.mark.parametrize(("with_modules", "expected"), [(True, "a/b/inner/deep/Exp:0"), (False, "a/b/deep/Exp:0")])
def test_scopes_and_submodules_nest(with_modules, expected):
    def forward(model, x):
        with poptorch.NameScope("a"), poptorch.NameScope("b"):
            return model.inner(x)

    options = poptorch.Options()
    if not with_modules:
        options.disableModuleNamescope()
    assert expected in compiled(forward, torch.ones(1), options=options).getTensorNames()


def test_gradients_are_in_the_scope_of_their_values():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            with poptorch.NameScope("part"):
                y = torch.sin(self.w * x)
            return poptorch.identity_loss(y, "sum")

    module = Scaled()
    training = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    training(torch.ones(2))
    assert "part/Gradient/Cos:0" in training.getTensorNames()


def test_a_name_scope_takes_a_text():
    with pytest.raises(AssertionError, match="takes a text, not 3"):
        poptorch.NameScope(3)


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)

    def forward(self, x):
        with poptorch.Attribute(__outline={"layer": "embedding"}):
            x = self.first(x)
        return self.second(x)


def test_an_attribute_is_about_the_operations_inside_only():
    model = poptorch.inferenceModel(Norms())
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(model(x), Norms()(x))
    nodes = model._executable.step.graph.ops.nodes
    norms = [node for node in nodes if "group_norm" in str(node.target)]
    outline = (("__outline", (("layer", "embedding"),)),)
    assert [hint_of(node, ATTRIBUTES) for node in norms] == [outline, None]
    ops = json.loads(model._debugGetPopartIR())["maingraph"]
    found = [op["attributes"] for op in ops if "group_norm" in op["type"]]
    assert found == [{"attributes": {"__outline": {"layer": "embedding"}}}, {}]


def test_nested_attributes_merge_and_are_restored():
    def forward(model, x):
        with poptorch.Attribute(a={"k": "outer", "o": "1"}):
            x = torch.sin(x)
            with poptorch.Attribute(a={"k": "inner"}, b={"n": "2"}):
                x = torch.cos(x)
            x = torch.tanh(x)
        return torch.exp(x)

    found = attributes(compiled(forward, torch.ones(1)))
    outer = (("a", (("k", "outer"), ("o", "1"))),)
    assert found["aten.sin.default"] == found["aten.tanh.default"] == outer
    assert found["aten.cos.default"] == (("a", (("k", "inner"), ("o", "1"))), ("b", (("n", "2"),)))
    assert found["aten.exp.default"] is None


def test_an_exception_inside_does_not_leave_the_scope_open():
    def forward(model, x):
        try:
            with poptorch.Attribute(a={"k": "v"}), poptorch.NameScope("lost"):
                raise KeyError
        except KeyError:
            return torch.exp(x)

    model = compiled(forward, torch.ones(1))
    assert attributes(model) == {"aten.exp.default": None}
    assert "Exp:0" in model.getTensorNames()


@pytest.mark.parametrize("wrong", ["embedding", {"layer": 3}, {3: "layer"}])
def test_attributes_are_dictionaries_of_texts(wrong):
    with pytest.raises(AssertionError, match="__outline"):
        poptorch.Attribute(__outline=wrong)


def test_one_object_can_be_used_again():
    scope, attribute = poptorch.NameScope("again"), poptorch.Attribute(layer={"k": "v"})

    def forward(model, x):
        for _ in range(2):
            with scope, attribute, attribute:
                x = x + 1
        return x

    names = compiled(forward, torch.ones(1)).getTensorNames()
    assert {"again/Add:0", "again/Add__1:0"} <= set(names)
