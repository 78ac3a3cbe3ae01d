"""Every torch optimiser with every combination of its flags: compiled steps equal eager steps, state included."""

from __future__ import annotations

import copy
import inspect
import itertools
import os

import pytest
import torch

import poptorch
from optim.banks import Bank, options

STEPS = 20
EVERYTHING = bool(os.environ.get("POPTORCH_FULL_ORACLE"))  # all flags in every shape: about ten times the time


def combinations(**choices):
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def also(settings, **numbers):
    """One more combination, in which numbers that are not just on or off have other values."""
    return [*settings, {**settings[-1], **numbers}]


def valid_sgd(flags):
    return not flags["nesterov"] or (flags["momentum"] and not flags["dampening"])


DECAY, EITHER, BETAS = (0.0, 0.1), (False, True), (0.5, 0.8)
OPTIMIZERS = {
    "SGD": [
        flags
        for flags in combinations(
            momentum=(0.0, 0.9), dampening=(0.0, 0.5), weight_decay=DECAY, nesterov=EITHER, maximize=EITHER
        )
        if valid_sgd(flags)
    ],
    "Adam": also(
        combinations(weight_decay=DECAY, amsgrad=EITHER, maximize=EITHER, decoupled_weight_decay=EITHER),
        betas=BETAS,
        eps=1e-3,
    ),
    "AdamW": also(combinations(weight_decay=DECAY, amsgrad=EITHER, maximize=EITHER), betas=BETAS, eps=1e-3),
    "RMSprop": also(
        combinations(momentum=(0.0, 0.9), centered=EITHER, weight_decay=DECAY, maximize=EITHER), alpha=0.9, eps=1e-3
    ),
    "Adagrad": also(
        combinations(lr_decay=(0.0, 0.1), weight_decay=DECAY, maximize=EITHER), initial_accumulator_value=0.5, eps=1e-3
    ),
    "Adadelta": also(combinations(weight_decay=DECAY, maximize=EITHER), rho=0.5, eps=1e-3),
    "Adamax": also(combinations(weight_decay=DECAY, maximize=EITHER), betas=BETAS, eps=1e-3),
    "NAdam": also(
        combinations(weight_decay=DECAY, decoupled_weight_decay=EITHER, maximize=EITHER),
        betas=BETAS,
        eps=1e-3,
        momentum_decay=0.1,
    ),
    "RAdam": also(
        combinations(weight_decay=DECAY, decoupled_weight_decay=EITHER, maximize=EITHER), betas=BETAS, eps=1e-3
    ),
    "ASGD": also(combinations(weight_decay=DECAY, maximize=EITHER), t0=5, lambd=1e-2, alpha=0.5),
    "Rprop": also(combinations(maximize=EITHER), etas=(0.3, 1.5), step_sizes=(1e-3, 0.02)),
    "Adafactor": also(
        combinations(weight_decay=DECAY, maximize=EITHER, eps=((1e-3, 1e-2), (None, 1e-3))), d=1.5, beta2_decay=-0.5
    ),
    "Muon": also(
        combinations(weight_decay=DECAY, nesterov=EITHER, adjust_lr_fn=("original", "match_rms_adamw")), momentum=0.5
    ),
}
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")  # how torch computes, not what
REFUSED = {"LBFGS", "SparseAdam"}  # see test_host_step
ALL_SHAPES = list(itertools.product((1, 4), (1, 2), (False, True)))  # gradient accumulation, replicas, Sum
PAIRS = [(1, 1, False), (1, 2, True), (4, 1, True), (4, 2, False)]  # every two of these values meet
SHAPES = ALL_SHAPES if EVERYTHING else PAIRS
FIRST = SHAPES[0]
TOLERANCE = {"Muon": 1e-3}  # computes in bfloat16, so a last digit of float32 can become a last digit of bfloat16


def covering(settings):
    """As few of the combinations as make every value of every flag occur."""
    chosen, missing = [], set().union(*(flags.items() for flags in settings))
    while missing:
        chosen.append(max(settings, key=lambda flags: len(missing & flags.items())))
        missing -= chosen[-1].items()
    return chosen


def twins(name, settings, shape, engine):
    """A model with one group per combination of flags, and its twin for plain PyTorch."""
    model = Bank(len(settings))
    twin = copy.deepcopy(model)
    make = getattr(torch.optim, name)
    optimizer, reference = (
        make(m.groups(copy.deepcopy(settings), only_matrices=name == "Muon"), lr=0.01) for m in (model, twin)
    )
    accumulation, replicas, sums = shape
    made = options(accumulation=accumulation, replicas=replicas, sums=sums, engine=engine)
    return poptorch.trainingModel(model, made, optimizer), optimizer, twin, reference


def check_same_steps(name, settings, shape, engine, tolerance=None):
    tolerance = tolerance or TOLERANCE.get(name, 1e-5)
    training, optimizer, twin, reference = twins(name, settings, shape, engine)
    for group in reference.param_groups:
        group.update(dict.fromkeys(group.keys() & set(IMPLEMENTATION), False))
    accumulation, replicas, sums = shape
    count = accumulation * replicas
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, target = torch.randn(2 * count, 3, generator=generator), torch.randn(2 * count, generator=generator)
        training(x, target)
        reference.zero_grad()
        for part in zip(x.chunk(count), target.chunk(count), strict=True):
            (twin(*part)[1] / (1 if sums else count)).backward()
        reference.step()
    how = {"rtol": 10 * tolerance, "atol": tolerance}
    torch.testing.assert_close(dict(training.model.named_parameters()), dict(twin.named_parameters()), **how)
    torch.testing.assert_close(optimizer.state_dict()["state"], reference.state_dict()["state"], **how)


CASES = list(itertools.product(OPTIMIZERS, SHAPES))


@pytest.mark.parametrize(
    ("name", "shape"), CASES, ids=[f"{n}-G{g}R{r}{'Sum' if s else 'Mean'}" for n, (g, r, s) in CASES]
)
def test_compiled_steps_equal_eager_steps(name, shape):
    settings = OPTIMIZERS[name]
    check_same_steps(name, settings if EVERYTHING or shape == FIRST else covering(settings), shape, "eager")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flags_for_how_torch_computes_change_nothing(name):
    known = inspect.signature(getattr(torch.optim, name)).parameters
    settings = [{flag: True} for flag in IMPLEMENTATION if flag in known]
    if settings:
        check_same_steps(name, settings, FIRST, "eager")


def test_no_optimiser_of_torch_is_forgotten():
    there = {name for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    assert there == {*OPTIMIZERS, *REFUSED, "Optimizer"}


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adafactor"])
def test_native_code_does_the_same(name, engine):
    check_same_steps(name, covering(OPTIMIZERS[name]), (4, 1, False), engine, tolerance=1e-4)
