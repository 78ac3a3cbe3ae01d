"""Where custom ops are found: in the registry, and among the ops that libraries define."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch
from poptorch.ops.custom import OpName, find

LIBRARY = torch.library.Library("test_acme", "DEF")


def define(schema: str, function, meta=None) -> None:
    """An op as a C++ library would register it: for the CPU and, if it describes its results, for `Meta`."""
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, function, "CPU")
    if meta is not None:
        LIBRARY.impl(name, meta, "Meta")


def like_first(x: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
    return torch.empty_like(x)


define("Opaque(Tensor x, float scale=1.0) -> Tensor", lambda x, scale=1.0: x.square() * scale)
define("Described(Tensor x, float scale=1.0) -> Tensor", lambda x, scale=1.0: x.square() * scale, like_first)
define("snake_case(Tensor x) -> Tensor", lambda x: x + 1, like_first)
define("Version_v2(Tensor x) -> Tensor", lambda x: x * 2, like_first)
define("Version(Tensor x) -> Tensor", lambda x: x * 1, like_first)
define("Sum(Tensor[] xs) -> Tensor", sum, lambda xs: torch.empty_like(xs[0]))
define("One(Tensor x) -> Tensor[]", lambda x: [x * 5], lambda x: [torch.empty_like(x)])
for _name in ("Opaque", "Described"):
    torch.library.register_autograd(
        f"test_acme::{_name}",
        lambda ctx, gradient: (gradient * 2 * ctx.saved_tensors[0] * ctx.scale, None),
        setup_context=lambda ctx, inputs, output: (
            ctx.save_for_backward(inputs[0]),
            setattr(ctx, "scale", inputs[1]),
        ),
    )


@torch.library.custom_op("test_acme::python", mutates_args=())
def python_op(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() + 3)  # no function describes its result


class Applies(nn.Module):
    def __init__(self, name, version=1, domain="test.acme", **attributes):
        super().__init__()
        self.call, self.attributes = (name, domain, version), attributes

    def forward(self, *inputs):
        return poptorch.custom_op(inputs, *self.call, [inputs[0]], self.attributes)[0]


def ops_of(executor: poptorch.PoplarExecutor) -> set[str]:
    return {str(node.target) for node in executor._executable.step.graph.ops.nodes if node.op == "call_function"}


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("Opaque", 1, 9.0),
        ("Described", 1, 9.0),
        ("snake_case", 1, 4.0),
        ("SnakeCase", 1, 4.0),
        ("Version", 1, 3.0),
        ("Version", 2, 6.0),
        ("Sum", 1, 3.0),
        ("One", 1, 15.0),
        ("python", 1, 6.0),
    ],
)
def test_ops_of_libraries_are_found(name, version, expected):
    assert poptorch.inferenceModel(Applies(name, version))(torch.tensor([3.0])).tolist() == [expected]


@pytest.mark.parametrize(("name", "version"), [("snake_case", 2), ("snake", 1), ("__class__", 1)])
def test_other_names_are_not_found(name, version):
    assert find(OpName("test.acme", name, version)) is None


def test_an_op_that_describes_its_results_is_a_node_of_the_program():
    described = poptorch.inferenceModel(Applies("Described", scale=2.0))
    assert described(torch.tensor([3.0])).tolist() == [18]
    assert ops_of(described) == {"test_acme.Described.default"}
    opaque = poptorch.inferenceModel(Applies("Opaque", scale=2.0))
    assert opaque(torch.tensor([3.0])).tolist() == [18]
    assert "poptorch.host_call.default" in ops_of(opaque)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["Opaque", "Described"])
def test_training_uses_the_derivative_of_the_op(engine, name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            hidden = self.fc(x)
            (y,) = poptorch.custom_op([hidden], name, "test.acme", 1, [hidden], {"scale": 0.5})
            return y, poptorch.identity_loss(y, "mean")

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 3)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    y, _ = poptorch.trainingModel(model, poptorch.Options().engine(engine), optimizer)(x)
    expected = plain.fc(x).square() * 0.5
    torch.testing.assert_close(y, expected.detach())
    expected.mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("op", "expected"),
    [(torch.ops.test_acme.snake_case, 4), (torch.ops.test_acme.snake_case.default, 4), (python_op, 6)],
)
def test_ops_of_torch_can_be_registered_under_any_name(op, expected):
    poptorch.registerCustomOp("Mine", "test.other", 3, op)
    found = poptorch.inferenceModel(Applies("Mine", 3, "test.other"))(torch.tensor([3.0]))
    assert found.item() == expected


def test_what_is_registered_comes_before_what_a_library_defines():
    poptorch.registerCustomOp("Version", "test_acme", 1, lambda inputs, attributes: inputs[0] * 100)
    assert poptorch.inferenceModel(Applies("Version", 1, "test_acme"))(torch.ones(1)).item() == 100


def test_an_op_of_torch_may_be_given_a_backward_function():
    forward, backward = torch.ops.test_acme.snake_case, lambda gradients, *rest: [gradients[0] * 7]
    poptorch.registerCustomOp("Seven", "test.other", 1, forward, backward)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

        def forward(self):
            (y,) = poptorch.custom_op([self.w], "Seven", "test.other", 1, [self.w])
            return poptorch.identity_loss(y, "sum")

    model = Model()
    poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))()
    assert model.w.tolist() == [-7, -7]


def test_an_unknown_op_names_those_of_its_library():
    with pytest.raises(poptorch.Error, match=r"torch\.ops\.test_acme\.Described"):
        poptorch.inferenceModel(Applies("Describe"))(torch.ones(1))
