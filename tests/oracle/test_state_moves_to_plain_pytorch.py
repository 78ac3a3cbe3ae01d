"""Weights and optimiser state move between poptorch and plain PyTorch, in both directions, at any moment."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

import poptorch
from oracle.eager_reference import EagerReference, assert_same
from oracle.test_training_matches_eager import TOLERANCE, arguments, optimizer_state, options_for, state_of
from oracle.zoo import Case, find

Make = Callable[[nn.Module], torch.optim.Optimizer]


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.003}]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.05),
    "sgd-momentum": lambda m: SGD(m.parameters(), lr=0.02, momentum=0.9),
    "sgd-nesterov": lambda m: SGD(m.parameters(), lr=0.02, momentum=0.8, nesterov=True, weight_decay=0.1),
    "sgd-dampening": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "sgd-maximize": lambda m: SGD(m.parameters(), lr=0.005, momentum=0.5, maximize=True, weight_decay=0.1),
    "sgd-groups": lambda m: SGD(_groups(m), lr=0.02, momentum=0.9),
    "adam": lambda m: Adam(m.parameters(), lr=0.01),
    "adam-amsgrad": lambda m: Adam(m.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1, betas=(0.7, 0.9)),
    "adam-maximize": lambda m: Adam(m.parameters(), lr=0.001, maximize=True, eps=1e-4),
    "adam-groups": lambda m: Adam(_groups(m), lr=0.01),
    "adamw": lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.2),
    "adamw-amsgrad": lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.0, amsgrad=True),
    "adamw-maximize": lambda m: AdamW(m.parameters(), lr=0.001, maximize=True, amsgrad=True),
    "adamw-groups": lambda m: AdamW(_groups(m), lr=0.01),
    "adamw-tensor-lr": lambda m: AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "rmsprop": lambda m: RMSprop(m.parameters(), lr=0.005),
    "rmsprop-centered": lambda m: RMSprop(m.parameters(), lr=0.005, centered=True, alpha=0.9, eps=1e-3),
    "rmsprop-momentum": lambda m: RMSprop(m.parameters(), lr=0.001, momentum=0.9, weight_decay=0.1, eps=0.1),
    "rmsprop-all": lambda m: RMSprop(m.parameters(), lr=0.001, momentum=0.5, centered=True, maximize=True, eps=0.1),
}
FUSED, SPLIT = (1, 1, 1), (2, 2, 1)
BEFORE, AFTER = 4, 4

all_optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
some_optimizers = pytest.mark.parametrize(
    "make",
    [OPTIMIZERS[n] for n in ("sgd-momentum", "sgd-dampening", "adamw-amsgrad", "adam-groups", "rmsprop-momentum")],
)
both_shapes = pytest.mark.parametrize("shape", [FUSED, SPLIT], ids=["fused", "split"])


class Wrapped:
    """One of the two ways to train a module, with the state that it leaves behind."""

    def __init__(self, case: Case, make: Make, shape: tuple[int, int, int], engine: str | None, seed: int = 0) -> None:
        d, g, r = shape
        self.module = case.build(seed).train()
        self.optimizer = make(self.module)
        self.engine = engine
        self._make_step = lambda: (
            poptorch.trainingModel(self.module, options_for(engine, d, g, r), self.optimizer)
            if engine is not None
            else EagerReference(
                self.module,
                device_iterations=d,
                gradient_accumulation=g,
                replicas=r,
                optimizer=self.optimizer,
                loss=case.loss,
            )
        )
        self._step: Any = None

    def train(self, calls: list[Any]) -> list[Any]:
        if self._step is None:
            self._step = self._make_step()
        return [self._step(*args, **kwargs) for args, kwargs in calls]

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save({"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])


def data(case: Case, shape: tuple[int, int, int], count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    d, g, r = shape
    return [arguments(case, generator, d * g * r) for _ in range(count)]


def check_same_end(one: Wrapped, other: Wrapped, results: list[Any], expected: list[Any], engine: str) -> None:
    how = TOLERANCE[engine]
    assert_same(results, expected, **how)
    assert_same(state_of(one.module), state_of(other.module), **how, where="state")
    assert_same(optimizer_state(one.optimizer), optimizer_state(other.optimizer), **how, where="optimizer")


@all_optimizers
def test_poptorch_then_plain_is_plain(make: Make, engine: str) -> None:
    (case,) = find("BatchNorm1d")
    shape = FUSED
    calls = data(case, shape, BEFORE + AFTER)
    ours, continued = Wrapped(case, make, shape, engine), Wrapped(case, make, shape, None, seed=9)
    plain = Wrapped(case, make, shape, None)
    ours.train(calls[:BEFORE])
    continued.load(ours.save())
    plain.train(calls[:BEFORE])
    results, expected = continued.train(calls[BEFORE:]), plain.train(calls[BEFORE:])
    check_same_end(continued, plain, results, expected, engine)


@all_optimizers
def test_plain_then_poptorch_is_plain(make: Make, engine: str) -> None:
    (case,) = find("BatchNorm1d")
    shape = SPLIT
    calls = data(case, shape, BEFORE + AFTER)
    plain, continued = Wrapped(case, make, shape, None), Wrapped(case, make, shape, engine, seed=9)
    plain.train(calls[:BEFORE])
    continued.load(plain.save())
    results, expected = continued.train(calls[BEFORE:]), plain.train(calls[BEFORE:])
    check_same_end(continued, plain, results, expected, engine)


@some_optimizers
def test_state_loaded_into_a_compiled_model_is_used(make: Make, engine: str) -> None:
    """Loading replaces the tensors of the optimiser; the next call works on the new ones."""
    (case,) = find("BatchNorm1d")
    shape = (1, 2, 1)
    calls = data(case, shape, BEFORE + AFTER)
    plain, ours = Wrapped(case, make, shape, None), Wrapped(case, make, shape, engine, seed=9)
    ours.train(calls[AFTER:])
    plain.train(calls[:BEFORE])
    ours.load(plain.save())
    results, expected = ours.train(calls[BEFORE:]), plain.train(calls[BEFORE:])
    check_same_end(ours, plain, results, expected, engine)


@some_optimizers
def test_the_module_can_be_trained_by_both_in_turn(make: Make, engine: str) -> None:
    """The same objects: some steps through poptorch, some by the user's own loop, and again."""
    (case,) = find("BatchNorm1d")
    shape = (1, 1, 1)
    calls = data(case, shape, 8)
    ours, plain = Wrapped(case, make, shape, engine), Wrapped(case, make, shape, None)
    own_loop = EagerReference(ours.module, optimizer=ours.optimizer, loss=case.loss)
    results: list[Any] = []
    for start in (0, 4):
        results += ours.train(calls[start : start + 2])
        results += [own_loop(*args, **kwargs) for args, kwargs in calls[start + 2 : start + 4]]
    check_same_end(ours, plain, results, plain.train(calls), engine)


@pytest.mark.parametrize("name", ["sgd-groups", "adamw"])
@both_shapes
def test_learning_rate_schedules(name: str, shape: tuple[int, int, int], engine: str) -> None:
    """After the schedule has moved on, `setOptimizer` hands the new rate over; torch has nothing to warn about."""
    (case,) = find("Mlp")
    make = OPTIMIZERS[name]
    calls = data(case, shape, 6)
    ours, plain = Wrapped(case, make, shape, engine), Wrapped(case, make, shape, None)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(w.optimizer, lambda n: 0.5**n + 0.1 * (n == 2)) for w in (ours, plain)
    ]
    results: list[Any] = []
    expected: list[Any] = []
    for call in calls:
        results += ours.train([call])
        expected += plain.train([call])
        for schedule in schedules:
            schedule.step()
        ours._step.setOptimizer(ours.optimizer)
    check_same_end(ours, plain, results, expected, engine)


def test_momentum_and_other_numbers_may_change_between_calls(engine: str) -> None:
    (case,) = find("Mlp")
    shape = (1, 2, 1)
    calls = data(case, shape, 6)
    ours, plain = (Wrapped(case, OPTIMIZERS["adamw"], shape, e) for e in (engine, None))
    results: list[Any] = []
    expected: list[Any] = []
    for number, call in enumerate(calls):
        for wrapped in (ours, plain):
            wrapped.optimizer.param_groups[0].update(betas=(0.5 + 0.05 * number, 0.9), weight_decay=0.1 + 0.1 * number)
        results += ours.train([call])
        expected += plain.train([call])
        if number < len(calls) - 1:
            ours.optimizer.param_groups[0].update(betas=(0.55 + 0.05 * number, 0.9), weight_decay=0.2 + 0.1 * number)
            ours._step.setOptimizer(ours.optimizer)
    check_same_end(ours, plain, results, expected, engine)


def test_a_new_optimizer_of_the_same_kind_starts_from_its_own_state(engine: str) -> None:
    """A loaded optimiser replaces the old one, with its own state."""
    (case,) = find("Mlp")
    shape, make = (1, 1, 1), OPTIMIZERS["adam"]
    calls = data(case, shape, BEFORE + AFTER)
    ours, plain = Wrapped(case, make, shape, engine), Wrapped(case, make, shape, None)
    ours.train(calls[AFTER:])
    plain.train(calls[:BEFORE])
    replacement = make(ours.module)
    state = torch.load(io.BytesIO(plain.save()), weights_only=True)
    ours.module.load_state_dict(state["module"])
    replacement.load_state_dict(state["optimizer"])
    ours._step.setOptimizer(replacement)
    ours.optimizer = replacement
    results, expected = ours.train(calls[BEFORE:]), plain.train(calls[BEFORE:])
    check_same_end(ours, plain, results, expected, engine)


@pytest.mark.inductor
def test_native_code_leaves_plain_state_behind(engine: str) -> None:
    """Native code may change the memory layout of weights; what is saved loads everywhere all the same."""
    (case,) = find("BatchNorm2d")
    shape, make = (1, 2, 1), OPTIMIZERS["adamw-amsgrad"]
    calls = data(case, shape, BEFORE + AFTER)
    ours, continued = Wrapped(case, make, shape, engine), Wrapped(case, make, shape, None, seed=9)
    plain = Wrapped(case, make, shape, None)
    ours.train(calls[:BEFORE])
    continued.load(ours.save())
    plain.train(calls[:BEFORE])
    results, expected = continued.train(calls[BEFORE:]), plain.train(calls[BEFORE:])
    check_same_end(continued, plain, results, expected, engine)
    assert all(
        parameter.stride() == twin.stride() for parameter, twin in zip(*map(_conv, (continued, plain)), strict=True)
    )


def _conv(wrapped: Wrapped) -> list[torch.Tensor]:
    return [parameter for parameter in wrapped.module.parameters() if parameter.dim() == 4]
