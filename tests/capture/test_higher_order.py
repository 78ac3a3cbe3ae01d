"""torch.cond and torch.while_loop in a model: the same as in eager PyTorch, also in training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, *tensors):
        return self.function(self, *tensors)


def compiled(function, engine="eager"):
    return poptorch.inferenceModel(Model(function), poptorch.Options().engine(engine))


@pytest.mark.inductor
def test_cond_chooses_when_the_program_runs(engine):
    def forward(model, x):
        return torch.cond(x.sum() > 0, lambda x: model.first(x) * model.scale, lambda x: x - 1, (x,))

    model, x = compiled(forward, engine), torch.rand(2, 4)
    torch.testing.assert_close(model(x), Model(None).first(x).detach() * 2)
    torch.testing.assert_close(model(-x), -x - 1)


def test_cond_returns_what_its_branches_return():
    def forward(model, x):
        found = torch.cond(x.sum() > 0, lambda: {"a": x, "b": (x + 1,)}, lambda: {"a": -x, "b": (x - 1,)})
        return found["a"], found["b"][0]

    model, x = compiled(forward), torch.rand(4)
    assert all(map(torch.equal, model(x), (x, x + 1)))
    assert all(map(torch.equal, model(-x), (x, -x - 1)))


def test_cond_on_a_python_bool_is_a_python_branch():
    model, x = compiled(lambda model, x: torch.cond(x.shape[0] > 2, torch.sin, torch.cos, (x,))), torch.rand(4)
    torch.testing.assert_close(model(x), x.sin())


@pytest.mark.inductor
def test_while_loop_runs_as_often_as_its_condition_says(engine):
    def forward(model, x, limit):
        return torch.while_loop(
            lambda n, x: (n < 20) & (x.sum() < limit.sum()),
            lambda n, x: (n + 1, x * model.scale),
            (torch.zeros((), dtype=torch.int32), x),
        )

    model = compiled(forward, engine)
    for limit, runs in ((100.0, 5), (3.0, 0), (1000.0, 8)):
        count, x = model(torch.ones(4), torch.tensor([limit]))
        assert count == runs
        assert torch.equal(x, torch.full((4,), 2.0**runs))


class Branching(nn.Module):
    """One branch or another, and a third inside of it; `chooses` tells how."""

    def __init__(self, chooses):
        super().__init__()
        torch.manual_seed(0)
        self.chooses = chooses
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, target):
        hidden = self.first(x)

        def inner(hidden):
            return self.chooses(x.mean() > -2, lambda: hidden * self.second(hidden), lambda: hidden + self.first(x), ())

        result = self.chooses(
            x.sum() > 0, lambda h: self.first(h) * h + self.second(x), lambda h: inner(h) + hidden, (hidden,)
        )
        return result, F.mse_loss(result, target)


def python_branch(condition, then, otherwise, operands):
    return then(*operands) if condition else otherwise(*operands)


@pytest.mark.inductor
def test_cond_is_differentiated(engine):
    ours, theirs = Branching(torch.cond), Branching(python_branch)
    training = poptorch.trainingModel(
        ours, poptorch.Options().engine(engine), torch.optim.SGD(ours.parameters(), lr=0.1)
    )
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    target = torch.rand(2, 4)
    for x in (torch.ones(2, 4), -torch.ones(2, 4), torch.full((2, 4), -3.0), torch.rand(2, 4)):
        result, loss = training(x, target)
        optimizer.zero_grad()
        expected, expected_loss = theirs(x, target)
        expected_loss.backward()
        optimizer.step()
        torch.testing.assert_close((result, loss), (expected.detach(), expected_loss.detach()))
        torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


class InLoop(nn.Module):
    """Functions that see another layer in every turn, and compute a part without gradients."""

    def __init__(self, chooses):
        super().__init__()
        torch.manual_seed(0)
        self.chooses = chooses
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, target):
        def without_gradient(x):
            with torch.no_grad():
                return x.exp()

        for i in range(2):
            x = self.chooses(
                x.mean() > 0,
                lambda x: F.relu(self.layers[2 * i](x)) * without_gradient(x),  # noqa: B023
                lambda x: F.layer_norm(Straight.apply(self.layers[2 * i + 1](x)), (4,)),  # noqa: B023
                (x,),
            )
        return F.mse_loss(x, target)


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients through as they are."""

    @staticmethod
    def forward(ctx, x):
        return x.mul(4).round().div(4)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_branch_is_differentiated_as_it_was_when_it_ran(accumulated):
    ours, theirs = InLoop(torch.cond), InLoop(python_branch)
    options = poptorch.Options()
    options.Training.gradientAccumulation(accumulated)
    training = poptorch.trainingModel(ours, options, torch.optim.SGD(ours.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for sign in (1, -1):
        x, target = sign * torch.rand(2 * accumulated, 4), torch.rand(2 * accumulated, 4)
        training(x, target)
        optimizer.zero_grad()
        for rows in zip(x.split(2), target.split(2), strict=True):
            (theirs(*rows) / accumulated).backward()
        optimizer.step()
        torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_a_function_that_takes_a_parameter_past_the_branch_is_refused():
    model = trained(lambda m, x: torch.cond(x.sum() > 0, lambda: Straight.apply(m.first.weight), lambda: m.first(x)))
    with pytest.raises(poptorch.Error, match="takes a tensor from outside"):
        model(torch.ones(4, 4))


def trained(function):
    model = Model(lambda model, x: poptorch.identity_loss(function(model, x), "mean"))
    return poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_draws_in_a_branch_that_is_differentiated_are_refused():
    model = trained(lambda m, x: torch.cond(x.sum() > 0, lambda: F.dropout(m.first(x)), lambda: m.first(x)))
    with pytest.raises(poptorch.Error, match="draws random numbers in a training model") as raised:
        model(torch.ones(2, 4))
    assert "test_higher_order.py" in str(raised.value)


def test_a_loop_that_would_have_to_be_differentiated_is_refused():
    def forward(model, x):
        return torch.while_loop(lambda x: x.sum() < 9, lambda x: (x + model.first(x).exp(),), (x,))[0]

    with pytest.raises(poptorch.Error, match="cannot be differentiated"):
        trained(forward)(torch.ones(2, 4))


def test_a_loop_without_gradients_is_part_of_training():
    def forward(model, x):
        with torch.no_grad():
            (grown,) = torch.while_loop(lambda x: x.sum() < 100, lambda x: (x * 2,), (x,))
        return model.first(grown)

    assert torch.isfinite(trained(forward)(torch.ones(2, 4)))


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (lambda m, x: torch.cond(x.sum() > 0, lambda x: x.add_(1), lambda x: x * 2, (x,)), "from outside"),
        (lambda m, x: torch.while_loop(lambda x: x.sum() < 9, lambda x: (x.add_(1),), (x,)), "one of its inputs"),
        (lambda m, x: torch.while_loop(lambda n, x: n < 9, lambda n, x: (n + 1, x), (0, x)), "not a tensor"),
        (lambda m, x: torch.while_loop(lambda x: x > 9, lambda x: (x + 1,), (x,)), "one truth value"),
        (lambda m, x: torch.cond(x.sum() > 0, lambda: (x, x), lambda: [x, x]), "different structures"),
        (lambda m, x: torch.cond(x.sum() > 0, lambda: x[:1], lambda: x[:3]), "return different tensors"),
    ],
)
def test_what_bodies_may_not_do(forward, text):
    with pytest.raises(poptorch.Error, match=text) as raised:
        compiled(forward)(torch.ones(2, 4))
    assert "test_higher_order.py" in str(raised.value)


def test_other_control_flow_of_pytorch_is_refused_with_a_way_out():
    from torch._higher_order_ops import scan

    def forward(model, x):
        return scan(lambda total, row: (total + row, total.clone()), torch.zeros(4), x)

    with pytest.raises(poptorch.Error, match=r"torch\.while_loop or poptorch\.for_loop"):
        compiled(forward)(torch.ones(2, 4))
