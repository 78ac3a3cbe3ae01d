"""Optimisers of the user's own: captured if their step() can be, refused with the reason if not."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import poptorch
from optim.banks import Given, options
from poptorch.optim.host_step import HostStep


class Lion(torch.optim.Optimizer):
    """As its authors wrote it: signs of an average of gradients."""

    def __init__(self, params, lr=0.1, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(torch.sign(update), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class CountsInState(torch.optim.Optimizer):
    """Counts steps with a Python number, as many optimisers do, and only computes with it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["seen"] = p.clone()
                state["step"] += 1
                p.add_(p.grad * (-group["lr"] / state["step"] ** 0.5))
                state["seen"].lerp_(p, 0.5)


class Branches(CountsInState):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad.norm() > 1:
                p.sub_(p.grad)


class CountsOutside(CountsInState):
    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * (0.1 / self.calls))


class StartsFromGradient(CountsInState):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "buffer" not in state:
                state["buffer"] = p.grad.clone()
            else:
                state["buffer"].mul_(0.9).add_(p.grad)
            p.sub_(state["buffer"] * 0.1)


class MakesTensors(CountsInState):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(torch.minimum(p.grad, torch.tensor(0.5)) * torch.tensor(0.1))


class MathOnCounter(CountsInState):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            p.sub_(p.grad / math.sqrt(state["step"]))


class Insists(CountsInState):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            assert p.numel() > 100, "this is for large parameters"
            p.sub_(p.grad)


class HoldsTensor(CountsInState):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * torch.full((), 0.1) * FACTOR)


class DrawsNumbers(CountsInState):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad + torch.randn_like(p))


class SharesNorm(CountsInState):
    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / norm)


FACTOR = torch.tensor(0.5)


def train(kind, **settings):
    model = Given()
    optimizer = kind(model.parameters(), **settings)
    return poptorch.trainingModel(model, options(), optimizer), optimizer


@pytest.mark.parametrize("kind", [Lion, CountsInState, StartsFromGradient, MakesTensors])
def test_own_step_is_captured(kind, caplog):
    training, optimizer = train(kind, lr=0.05)
    twin = copy.deepcopy(training.model)
    reference = kind(twin.parameters(), lr=0.05)
    for seed in range(20):
        rows = torch.randn(1, 3, generator=torch.Generator().manual_seed(seed))
        training(rows)
        twin.w.grad = rows[0].clone()
        reference.step()
    torch.testing.assert_close(training.model.w, twin.w)
    for key, value in reference.state[twin.w].items():
        torch.testing.assert_close(
            torch.as_tensor(optimizer.state[training.model.w][key]).float(), torch.as_tensor(value).float()
        )
    assert f"does not run Python optimizer code directly. {kind.__name__}: its step()" in caplog.text


def test_numbers_that_step_computes_with_can_change():
    training, optimizer = train(Lion, lr=0.05)
    training(torch.ones(1, 3))
    program, before = training._executable, training.model.w.detach().clone()
    optimizer.param_groups[0].update(lr=0.5, betas=(0.5, 0.5))
    training.setOptimizer(optimizer)
    training(torch.ones(1, 3))
    torch.testing.assert_close(training.model.w.detach(), before - 0.5)
    assert training._executable is program


def test_numbers_that_step_looks_at_are_constants():
    training, optimizer = train(torch.optim.Adadelta, weight_decay=0.1)
    rule = training._programs.optimizers.plans[0].groups[0].rule
    assert isinstance(rule, HostStep)
    assert {"lr", "rho", "eps"} <= set(rule.variable)
    training(torch.ones(1, 3))
    optimizer.param_groups[0]["weight_decay"] = 0.2
    with pytest.raises(poptorch.Error, match="Values are constant but do not match: weight_decay"):
        training.setOptimizer(optimizer)


def test_a_changed_learning_rate_repeats_no_trials(monkeypatch):
    training, optimizer = train(torch.optim.NAdam)
    training(torch.ones(1, 3))
    monkeypatch.setattr(HostStep, "_run_without_values", None)  # would raise if it was called
    optimizer.param_groups[0]["lr"] = 0.5
    training.setOptimizer(optimizer)
    training(torch.ones(1, 3))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Branches, "meta tensors"),
        (CountsOutside, "counts in Python outside self.state"),
        (MathOnCounter, "does not do the same in every step"),
        (DrawsNumbers, "draws random numbers"),
        (HoldsTensor, "neither a parameter nor in self.state"),
        (Insists, "this is for large parameters"),
        (torch.optim.LBFGS, "closure"),
        (torch.optim.SparseAdam, "does not support dense gradients"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_reason(kind, reason):
    with pytest.raises(AssertionError, match=f"{kind.__name__} cannot be compiled") as caught:
        train(kind)
    assert reason in str(caught.value)


def test_groups_that_depend_on_each_other_are_refused():
    """A program updates one group after the other, so a norm over all of them would be another number."""
    model = torch.nn.Linear(3, 2)
    optimizer = SharesNorm([{"params": [p]} for p in model.parameters()])
    with pytest.raises(AssertionError, match="does not treat each parameter group by itself"):
        poptorch.trainingModel(model, options(), optimizer)
    poptorch.trainingModel(model, options(), SharesNorm(model.parameters()))
    model = torch.nn.Linear(3, 2)
    poptorch.trainingModel(model, options(), Lion([{"params": [p]} for p in model.parameters()]))


def test_trials_leave_nothing_behind():
    model = Given()
    before = model.w.detach().clone()
    optimizer = CountsInState(model.parameters())
    poptorch.trainingModel(model, options(), optimizer)
    assert not optimizer.state
    assert model.w.grad is None
    assert torch.equal(model.w, before)
    assert not torch.compiler.is_compiling()


def test_an_optimiser_is_expected():
    with pytest.raises(AssertionError, match="an optimiser is expected, not str"):
        poptorch.trainingModel(Given(), options(), "adam")
