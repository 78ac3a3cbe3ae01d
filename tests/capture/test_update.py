"""The update of an optimiser joined to a step: which inputs it adds, what it computes, and what it waits for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch
from compiler.step_graphs import BACKWARD, FORWARD, UPDATE
from poptorch.capture.trained import LOSS_SCALING, SCALE_FACTOR, Update, trained_groups
from poptorch.capture.update import join_update
from poptorch.ir import GraphBuilder, InputSpec, OutputRole, OutputSpec, Role, is_update, note_of, verify
from poptorch.ir.python import as_function
from poptorch.optim.gradients import Clipping
from poptorch.optim.plan import plan_optimizer

aten = torch.ops.aten


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([4.0, 8.0]))


def step_of(module, changed=()):
    """A step whose gradient of every parameter is its input; forward adds one to the parameters in `changed`."""
    builder = GraphBuilder()
    names = [name for name, _ in module.named_parameters()]
    weights = {name: builder.input(InputSpec.of(name, Role.PARAMETER, torch.zeros(2))) for name in names}
    x = builder.input(InputSpec.of("x", Role.USER_INPUT, torch.zeros(2), key="x"))
    for name in names:
        gradient = builder.call(BACKWARD, aten.mul.Tensor, x, 1.0)
        builder.output(OutputSpec(name, OutputRole.GRADIENT), gradient)
    for name in changed:
        moved = builder.call(FORWARD, aten.add.Tensor, weights[name], 1.0)
        builder.output(OutputSpec(name, OutputRole.NEW_VALUE), moved)
    return builder.build("step")


def joined(module, optimizer, *, clipping=None, scales=(), changed=()):
    plan = plan_optimizer(optimizer)
    groups = trained_groups(module, [plan], [name for name, _ in module.named_parameters()])
    graph = join_update(
        step_of(module, changed), Update((plan,), groups, clipping or Clipping(), scales, torch.float32)
    )
    verify(graph)
    return graph, groups


def run(graph, groups, module, x, **given):
    """The new values by name; state starts at zero, the numbers of groups are those of the optimiser."""
    values = {**dict(module.named_parameters()), "x": x, **given}
    for group in groups:
        numbers = group.plan.values
        values.update({spec.name: torch.tensor(numbers[spec.key], dtype=spec.dtype) for spec in group.hypers})
    inputs = [
        values[s.name].detach() if s.name in values else torch.zeros(s.shape, dtype=s.dtype)
        for s in graph.signature.inputs
    ]
    results = as_function(graph.ops, graph.name, graph.graphs)(*inputs)
    outputs = zip(graph.signature.outputs, results, strict=True)
    return {spec.name: value for spec, value in outputs if spec.role is OutputRole.NEW_VALUE}


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.5, centered=True),
    "a user's own step": lambda p: torch.optim.Adagrad(p, lr=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_new_values_are_those_of_the_optimiser(name):
    module, plain, x = Pair(), Pair(), torch.tensor([0.25, -3.0])
    found = run(*joined(module, OPTIMIZERS[name](module.parameters())), module, x)
    for parameter in plain.parameters():
        parameter.grad = x.clone()
    OPTIMIZERS[name](plain.parameters()).step()
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(found[key], parameter.detach())


def test_every_op_of_the_update_says_so_and_those_of_the_step_are_as_before():
    graph, _ = joined(*_pair_with_sgd())
    directions = [note_of(node).direction for node in graph.ops.nodes if node.op == "call_function"]
    assert directions[:2] == [BACKWARD.direction] * 2
    assert set(directions[2:]) == {UPDATE.direction}
    results = {spec.name: node for spec, node in graph.outputs if spec.role is OutputRole.NEW_VALUE}
    assert all(map(is_update, results.values()))


def _pair_with_sgd(**settings):
    module = Pair()
    return module, torch.optim.SGD(module.parameters(), lr=0.5, **settings)


def test_gradients_are_still_returned_for_who_accumulates_them():
    graph, _ = joined(*_pair_with_sgd())
    assert [s.name for s in graph.signature.outputs if s.role is OutputRole.GRADIENT] == ["a", "b"]


def test_state_and_numbers_of_a_group_become_inputs_with_an_owner_or_a_group():
    graph, _ = joined(*_pair_with_sgd(momentum=0.9))
    state = [spec for spec in graph.signature.inputs if spec.role is Role.OPTIMIZER_STATE and spec.owner]
    assert {spec.owner for spec in state} == {"a", "b"}
    hypers = [spec for spec in graph.signature.inputs if spec.role is Role.HYPER]
    assert {spec.group for spec in hypers} == {0}
    assert "lr" in {spec.key for spec in hypers}


def test_each_group_has_numbers_of_its_own():
    module = Pair()
    optimizer = torch.optim.SGD([{"params": [module.a], "lr": 0.5}, {"params": [module.b]}], lr=2.0)
    found = run(*joined(module, optimizer), module, torch.ones(2))
    assert found["a"].tolist() == [0.5, 1.5]
    assert found["b"].tolist() == [2.0, 6.0]


def test_the_update_starts_from_what_forward_left_in_a_parameter():
    graph, groups = joined(*(pair := _pair_with_sgd()), changed=["a"])
    found = run(graph, groups, pair[0], torch.zeros(2))
    assert found["a"].tolist() == [2.0, 3.0]
    early = [spec.name for spec in graph.signature.outputs if spec.role is OutputRole.VALUE_BEFORE_UPDATE]
    assert early == ["a"]


def test_gradients_of_all_parameters_are_limited_together():
    module, optimizer = _pair_with_sgd()
    found = run(*joined(module, optimizer, clipping=Clipping(max_norm=1.0)), module, torch.tensor([3.0, 4.0]))
    gradients = torch.stack([torch.tensor([3.0, 4.0])] * 2)
    limited = gradients / (gradients.norm() + 1e-6)
    torch.testing.assert_close(found["a"], torch.tensor([1.0, 2.0]) - 0.5 * limited[0])


def test_the_loss_scale_is_taken_out_of_the_gradients():
    module, optimizer = _pair_with_sgd()
    scaled = {LOSS_SCALING.name: torch.tensor(8.0)}
    found = run(*joined(module, optimizer, scales=(LOSS_SCALING,)), module, torch.tensor([8.0, 16.0]), **scaled)
    assert found["a"].tolist() == [1 - 0.5 * 1, 2 - 0.5 * 2]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_automatic_scale_skips_an_update_that_overflowed_and_falls(bad):
    module, optimizer = _pair_with_sgd()
    graph, groups = joined(module, optimizer, scales=(LOSS_SCALING, SCALE_FACTOR))
    scaled = {LOSS_SCALING.name: torch.tensor(1.0), SCALE_FACTOR.name: torch.tensor(1024.0)}
    before = copy.deepcopy(module.state_dict())
    found = run(graph, groups, module, torch.tensor([bad, 1.0]), **scaled)
    assert found[SCALE_FACTOR.name] < 1024
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_the_type_for_adding_gradients_up_is_what_the_optimiser_asks_for():
    module = Pair()
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.5, accum_type=torch.float16)
    graph, _ = joined(module, optimizer)
    types = {s.accumulated_as for s in graph.signature.outputs if s.role is OutputRole.GRADIENT}
    assert types == {torch.float16}
