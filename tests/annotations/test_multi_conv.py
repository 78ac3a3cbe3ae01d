"""`MultiConv`: results are those of separate convolutions, each of which knows its options."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from poptorch.ir import hint_of


class Pair(nn.Module):
    """Two convolutions, one without bias, and something else between."""

    def __init__(self, scope):
        super().__init__()
        self.scope = scope
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1, bias=False)

    def forward(self, x):
        with self.scope:
            return self.first(x) + self.second(x).abs()


def infer(module, x):
    model = poptorch.inferenceModel(module)
    torch.testing.assert_close(model(x), module(x), rtol=1e-4, atol=1e-4)
    return model


def options(model):
    """What each op of a MultiConv knows, in the order of the program."""
    nodes = [node for node in model._executable.step.graph.ops.nodes if node.op == "call_function"]
    found = [(str(node.target), hint_of(node, "multi_conv")) for node in nodes]
    assert all("convolution" in target for target, said in found if said)
    return [dict(said) for _, said in found if said]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_multi_convolution_for_each_scope(depth):
    model = infer(nn.Sequential(*(Pair(poptorch.MultiConv()) for _ in range(depth))), torch.randn(1, 2, 4, 4))
    found = options(model)
    scopes = [said["scope"] for said in found]
    assert len(found) == 2 * depth
    assert len(set(scopes)) == depth
    assert [said["convolution"] for said in found] == [0, 1] * depth


def test_options_that_are_one_value_hold_for_all():
    scope = poptorch.MultiConv().availableMemoryProportions(0.8).partialsTypes(torch.half).enableConvDithering(True)
    scope = scope.planType(poptorch.MultiConvPlanType.Serial).perConvReservedTiles(120).cycleBackOff(0.3)
    expected = {
        "available_memory": 0.8,
        "partials": "half",
        "dithering": True,
        "plan": "Serial",
        "reserved_tiles": 120,
        "cycle_back_off": 0.3,
    }
    found = options(infer(Pair(scope), torch.randn(1, 2, 4, 4)))
    assert [said.items() >= expected.items() for said in found] == [True, True]


def test_options_that_are_lists_have_one_for_each():
    scope = poptorch.MultiConv().availableMemoryProportions((0.8, 0.7)).partialsTypes([torch.float, torch.float])
    found = options(infer(Pair(scope), torch.randn(1, 2, 4, 4)))
    assert [said["available_memory"] for said in found] == [0.8, 0.7]
    assert [said["partials"] for said in found] == ["float", "float"]


def test_none_resets_an_option():
    scope = poptorch.MultiConv().availableMemoryProportions(0.8).enableConvDithering(True)
    scope.planType(poptorch.MultiConvPlanType.Serial)
    scope.availableMemoryProportions(None).enableConvDithering(None).planType(None)
    found = options(infer(Pair(scope), torch.randn(1, 2, 4, 4)))
    assert set(found[0]) == {"scope", "convolution"}


def test_a_list_of_the_wrong_length_names_both_numbers():
    scope = poptorch.MultiConv().availableMemoryProportions([0.8, 0.7, 0.6])
    with pytest.raises(poptorch.Error, match="3 values of available_memory for 2 convolution"):
        infer(Pair(scope), torch.randn(1, 2, 4, 4))


class Larger(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 5), nn.Conv2d(4, 6, 3)
        self.fc = nn.Linear(24, 10)

    def forward(self, x):
        with poptorch.MultiConv():
            x = torch.relu(torch.max_pool2d(self.first(x), 2))
            x = torch.relu(torch.max_pool2d(self.second(x), 2))
        return torch.log_softmax(self.fc(x.flatten(1)), dim=-1)


def test_other_layers_may_stand_inside():
    assert len(options(infer(Larger(), torch.randn(2, 1, 16, 16)))) == 2


def test_the_backward_pass_belongs_to_it_too():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair(poptorch.MultiConv().availableMemoryProportions((0.8, 0.7)))

        def forward(self, x):
            return poptorch.identity_loss(self.pair(x), "sum")

    module = Model()
    training = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    training(torch.randn(1, 2, 4, 4))
    found = [(said["convolution"], said["available_memory"]) for said in options(training)]
    assert sorted(found) == [(0, 0.8), (0, 0.8), (1, 0.7), (1, 0.7)]


def test_scopes_do_not_nest():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair(poptorch.MultiConv())

        def forward(self, x):
            with poptorch.MultiConv():
                return self.pair(x)

    with pytest.raises(poptorch.Error, match=r"Nested poptorch.MultiConv is not supported"):
        poptorch.inferenceModel(Nested())(torch.randn(1, 2, 4, 4))


def test_a_scope_needs_a_convolution():
    class Empty(nn.Module):
        def forward(self, x):
            with poptorch.MultiConv():
                return x.abs()

    with pytest.raises(poptorch.Error, match="Unexpected end_multi_conv"):
        poptorch.inferenceModel(Empty())(torch.randn(2))
    assert Empty()(torch.tensor([-1.0])).item() == 1.0  # on the host it does nothing


@pytest.mark.parametrize(
    ("method", "value", "error", "message"),
    [
        ("availableMemoryProportions", "0.5", AssertionError, "float or a list"),
        ("availableMemoryProportions", [], AssertionError, "float or a list"),
        ("partialsTypes", "half", ValueError, "Invalid partials types"),
        ("partialsTypes", [torch.int32], ValueError, "Invalid partials types"),
        ("enableConvDithering", [1], ValueError, "list of them"),
        ("planType", "parallel", AssertionError, "Invalid plan type"),
        ("perConvReservedTiles", 1.5, AssertionError, "takes an int"),
        ("cycleBackOff", 1, AssertionError, "takes a float"),
    ],
)
def test_options_of_the_wrong_type(method, value, error, message):
    with pytest.raises(error, match=message):
        getattr(poptorch.MultiConv(), method)(value)


def test_older_names_of_types_are_taken():
    scope = poptorch.MultiConv().partialsTypes(poptorch.MultiConvPartialsType.Half)
    assert options(infer(Pair(scope), torch.randn(1, 2, 4, 4)))[0]["partials"] == "half"
