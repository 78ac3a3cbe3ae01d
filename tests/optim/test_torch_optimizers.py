"""Every torch optimiser with every combination of its flags: compiled steps equal eager steps, state included."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import poptorch
from optim.banks import Bank, options

STEPS = 20


def combinations(**choices):
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def valid_sgd(flags):
    return not flags["nesterov"] or (flags["momentum"] and not flags["dampening"])


DECAY, MAXIMIZE = (0.0, 0.1), (False, True)
OPTIMIZERS = {
    "SGD": [
        flags
        for flags in combinations(
            momentum=(0.0, 0.9), dampening=(0.0, 0.5), weight_decay=DECAY, nesterov=(False, True), maximize=MAXIMIZE
        )
        if valid_sgd(flags)
    ],
    "Adam": combinations(
        weight_decay=DECAY, amsgrad=(False, True), maximize=MAXIMIZE, betas=((0.9, 0.999), (0.5, 0.8))
    ),
    "AdamW": combinations(weight_decay=DECAY, amsgrad=(False, True), maximize=MAXIMIZE, eps=(1e-8, 1e-3)),
    "RMSprop": combinations(momentum=(0.0, 0.9), centered=(False, True), weight_decay=DECAY, maximize=MAXIMIZE),
    "Adagrad": combinations(lr_decay=(0.0, 0.1), weight_decay=DECAY, maximize=MAXIMIZE),
    "Adadelta": combinations(weight_decay=DECAY, maximize=MAXIMIZE),
    "Adamax": combinations(weight_decay=DECAY, maximize=MAXIMIZE),
    "NAdam": combinations(weight_decay=DECAY, decoupled_weight_decay=(False, True), maximize=MAXIMIZE),
    "RAdam": combinations(weight_decay=DECAY, decoupled_weight_decay=(False, True), maximize=MAXIMIZE),
    "ASGD": combinations(weight_decay=DECAY, maximize=MAXIMIZE, t0=(1e6, 5)),
    "Rprop": combinations(maximize=MAXIMIZE, etas=((0.5, 1.2), (0.3, 1.5))),
    "Adafactor": combinations(weight_decay=DECAY, maximize=MAXIMIZE, eps=((None, 1e-3), (1e-3, 1e-2))),
}
SHAPES = [(1, 1, False), (4, 1, False), (4, 1, True), (1, 2, False), (1, 2, True), (4, 2, False), (4, 2, True)]


def twins(name, shape, engine):
    """A model with one group per combination of flags, and its twin for plain PyTorch."""
    settings = OPTIMIZERS[name]
    model = Bank(len(settings))
    twin = copy.deepcopy(model)
    make = getattr(torch.optim, name)
    optimizer, reference = (make(m.groups(copy.deepcopy(settings)), lr=0.01) for m in (model, twin))
    accumulation, replicas, sums = shape
    made = options(accumulation=accumulation, replicas=replicas, sums=sums, engine=engine)
    return poptorch.trainingModel(model, made, optimizer), optimizer, twin, reference


def check_same_steps(name, shape, engine, steps=STEPS, tolerance=1e-5):
    training, optimizer, twin, reference = twins(name, shape, engine)
    accumulation, replicas, sums = shape
    count = accumulation * replicas
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, target = torch.randn(2 * count, 3, generator=generator), torch.randn(2 * count, generator=generator)
        training(x, target)
        reference.zero_grad()
        for part in zip(x.chunk(count), target.chunk(count), strict=True):
            (twin(*part)[1] / (1 if sums else count)).backward()
        reference.step()
    how = {"rtol": 10 * tolerance, "atol": tolerance}
    torch.testing.assert_close(dict(training.model.named_parameters()), dict(twin.named_parameters()), **how)
    torch.testing.assert_close(optimizer.state_dict(), reference.state_dict(), **how)


CASES = [
    *itertools.product(OPTIMIZERS, (SHAPES[0], SHAPES[-1])),
    *itertools.product(("SGD", "Adam"), SHAPES[1:-1]),  # how gradients are reduced does not depend on the rule
]


@pytest.mark.parametrize(
    ("name", "shape"), CASES, ids=[f"{n}-G{g}R{r}{'Sum' if s else 'Mean'}" for n, (g, r, s) in CASES]
)
def test_compiled_steps_equal_eager_steps(name, shape):
    check_same_steps(name, shape, "eager")


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adafactor"])
def test_native_code_does_the_same(name, engine):
    check_same_steps(name, (4, 1, False), engine, tolerance=1e-4)


def test_muon_trains_matrices_as_in_torch():
    model = Bank(2)
    twin = copy.deepcopy(model)
    optimizer, reference = (torch.optim.Muon(list(m.matrices), lr=0.1) for m in (model, twin))
    training = poptorch.trainingModel(model, options(), optimizer)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        batch = torch.randn(4, 3, generator=generator), torch.randn(4, generator=generator)
        training(*batch)
        reference.zero_grad()
        twin(*batch)[1].backward()
        reference.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()), rtol=2e-2, atol=2e-2)
