"""PopTorch's optimisers against their formulas, evaluated in NumPy with float64 and nothing of ours."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import poptorch
from optim.banks import Given, options

STEPS = 8
o = poptorch.optim


def gradients(count):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(count, 3, generator=generator) for _ in range(STEPS)]


# One step for one parameter: w, the gradient that enters the update, what is kept between steps, the step's number.


def sgd(w, g, kept, t, *, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
    if momentum == 0:
        return w * (1 - lr * (1 - dampening) * weight_decay) - lr * (1 - dampening) * g
    v = kept["v"] = momentum * kept.get("v", 0) + (1 - dampening) * (g + weight_decay * w)
    return w - lr * (g + weight_decay * w + momentum * v if nesterov else v)


def combined_sgd(w, g, kept, t, *, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, velocity_scaling=1.0):
    decay = (1 - dampening) * weight_decay * velocity_scaling
    v = kept.get("v", decay * w) + (1 - dampening) * velocity_scaling * g
    w = w - lr / velocity_scaling * v
    kept["v"] = momentum * v + decay * w
    return w


def moments(g, kept, t, betas, corrects):
    m = kept["m"] = betas[0] * kept.get("m", 0) + (1 - betas[0]) * g
    v = kept["v"] = betas[1] * kept.get("v", 0) + (1 - betas[1]) * g * g
    return (m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)) if corrects else (m, v)


def adam(w, g, kept, t, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    mean, variance = moments(g, kept, t, betas, corrects=True)  # the L2 term is in g already
    return w - lr * mean / (np.sqrt(variance) + eps)


def adamw(w, g, kept, t, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, bias_correction=None):
    mean, variance = moments(g, kept, t, betas, corrects=True)  # even if bias_correction is False
    return w - lr * (mean / (np.sqrt(variance) + eps) + weight_decay * w)


def lamb(
    w, g, kept, t, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, bias_correction=True, max_weight_norm=65500.0
):
    mean, variance = moments(g, kept, t, betas, bias_correction)
    x = mean / (np.sqrt(variance) + eps) + weight_decay * w
    weight_norm, norm = np.linalg.norm(w), np.linalg.norm(x)
    has_ratio = weight_norm and norm and max_weight_norm
    return w - lr * (min(weight_norm, max_weight_norm) / norm if has_ratio else 1.0) * x


def rmsprop(
    w, g, kept, t, *, lr, alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0, centered=False, use_tf_variant=False
):
    g = g + weight_decay * w
    s = kept["s"] = alpha * kept.get("s", 1.0 if use_tf_variant else 0.0) + (1 - alpha) * g * g
    c = kept["c"] = alpha * kept.get("c", 0) + (1 - alpha) * g
    q = s - c * c if centered else s
    if use_tf_variant:
        b = kept["b"] = momentum * kept.get("b", 0) + lr * g / np.sqrt(q + eps)
        return w - b
    b = kept["b"] = momentum * kept.get("b", 0) + g / (np.sqrt(q) + eps)
    return w - lr * b


def train_by_formula(formula, starts, settings, grads, max_grad_norm):
    """All parameters, because the limit on the norm of gradients is a common one."""
    weights, kept = list(starts), [{} for _ in starts]
    for t, g in enumerate(grads, 1):
        adds_penalty = formula is adam
        entering = [
            g + flags.get("weight_decay", 0) * w * adds_penalty for w, flags in zip(weights, settings, strict=True)
        ]
        norm = math.sqrt(sum((e * e).sum() for e in entering))
        entering = [e * max_grad_norm / max(max_grad_norm, norm) if max_grad_norm < math.inf else e for e in entering]
        everything = zip(weights, entering, kept, settings, strict=True)
        weights = [formula(w, e, k, t, **flags) for w, e, k, flags in everything]
    return weights


def combinations(**choices):
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


DECAY = (0.0, 0.1)
SEPARATE = [
    *combinations(momentum=(0.0, 0.9), dampening=(0.0, 0.3), weight_decay=DECAY),
    *combinations(momentum=(0.9,), nesterov=(True,), weight_decay=DECAY),
]
COMBINED = [
    *combinations(momentum=(0.9,), dampening=(0.0, 0.2), weight_decay=DECAY, velocity_scaling=(8.0,)),
    {"momentum": 0.0, "dampening": 0.2, "weight_decay": 0.1, "velocity_scaling": 0.5},
]
MOMENTS = combinations(betas=((0.9, 0.999), (0.5, 0.7)), eps=(1e-2,), weight_decay=DECAY)
NORMS = [*MOMENTS, *combinations(weight_decay=DECAY, max_weight_norm=(0.5, 0.0))]
ALPHA = [*combinations(momentum=(0.0, 0.5), weight_decay=DECAY), {"alpha": 0.9, "eps": 1e-2, "momentum": 0.5}]
LIMITS = (None, 0.5)

# Class, formula, what the whole optimiser is told, what each parameter group is told.
CASES = [
    *[(o.SGD, sgd, variant, SEPARATE) for variant in combinations(max_grad_norm=LIMITS)],
    *[(o.SGD, combined_sgd, v, COMBINED) for v in combinations(use_combined_accum=(True,), max_grad_norm=LIMITS)],
    *[(o.Adam, adam, variant, MOMENTS) for variant in combinations(max_grad_norm=LIMITS)],
    *[(o.AdamW, adamw, v, MOMENTS) for v in combinations(max_grad_norm=LIMITS, bias_correction=(None, False))],
    *[(o.LAMB, lamb, variant, NORMS) for variant in combinations(bias_correction=(True, False))],
    *[(o.RMSprop, rmsprop, v, ALPHA) for v in combinations(use_tf_variant=(False, True), centered=(False, True))],
]


class ManyGiven(nn.Module):
    """Parameters that all have the row as their gradient; the last one starts at zero."""

    def __init__(self, count: int) -> None:
        super().__init__()
        start = torch.tensor([0.5, -1.5, 2.0])
        self.ws = nn.ParameterList([start * (index + 1 < count) for index in range(count)])

    def forward(self, gradient):
        return poptorch.identity_loss((torch.stack(list(self.ws)) * gradient[0]).sum(), reduction="sum")


def result_and_formula(case, shape, *, is_variable, **types):
    """What training gives for every parameter, and what the formula gives."""
    kind, formula, variant, settings = case
    (accumulation, replicas, sums), count = shape, shape[0] * shape[1]
    settings = [*settings, {}]
    model = ManyGiven(len(settings))
    starts = [w.detach().double().numpy().copy() for w in model.ws]
    groups = [{"params": [w], **flags} for w, flags in zip(model.ws, settings, strict=True)]
    optimizer = kind(groups, lr=0.1, **variant, **types, loss_scaling=64.0 if is_variable else None)
    if is_variable:
        for name in set().union(*settings):
            optimizer.variable_attrs.markAsVariable(name)
    made = options(accumulation=accumulation, replicas=replicas, sums=sums)
    training = poptorch.trainingModel(model, made, optimizer)
    given = gradients(count)
    for rows in given:
        training(rows)
    reduced = [rows.double().numpy().sum(0) / (1 if sums else count) for rows in given]
    own = {name: value for name, value in variant.items() if name not in ("max_grad_norm", "use_combined_accum")}
    settings = [{"lr": 0.1, **own, **flags} for flags in settings]
    expected = train_by_formula(formula, starts, settings, reduced, variant.get("max_grad_norm") or math.inf)
    return [w.detach().double().numpy() for w in model.ws], expected


def name_of(case):
    kind, _, variant, _ = case
    return "-".join([kind.__name__, *(f"{name}={value}" for name, value in variant.items())])


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize(("is_variable", "shape"), [(False, (1, 1, False)), (True, (2, 2, True))])
def test_formula(case, is_variable, shape):
    """Constant numbers in one small step, and variable ones with a loss scaling in one that is summed up."""
    np.testing.assert_allclose(*result_and_formula(case, shape, is_variable=is_variable), rtol=2e-5, atol=4e-6)


ONE_OF_EACH = {case[:2]: (*case[:3], case[3][-1:]) for case in reversed(CASES)}  # of every formula, one group


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=name_of)
@pytest.mark.parametrize("sums", [False, True])
def test_formula_with_accumulation_and_replicas(case, sums):
    """What enters the formula is the mean or the sum over all micro-batches of all replicas."""
    np.testing.assert_allclose(*result_and_formula(case, (4, 2, sums), is_variable=False), rtol=2e-5, atol=4e-6)


@pytest.mark.parametrize("case", [case for case in CASES if set(case[2].values()) <= {None, True}], ids=name_of)
def test_formula_with_float16_state(case):
    """Half of the digits, and no more lost than that."""
    kind = case[0]
    names = (
        ["accum_type", "velocity_accum_type"] if kind is o.SGD else [name for name in kind.OWN if "accum_type" in name]
    )
    found, expected = result_and_formula(case, (2, 1, False), is_variable=False, **dict.fromkeys(names, torch.float16))
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


def test_lamb_leaves_zeros_without_gradient_alone():
    model = Given([0.0, 0.0])
    training = poptorch.trainingModel(model, options(), o.LAMB(model.parameters(), lr=0.1))
    training(torch.zeros(1, 2))
    assert model.w.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "replicas", "sums", "moved"),
    [([1.0, 3.0], 1, False, 0.2), ([1.0, 3.0], 1, True, 0.4), ([1.0, 5.0, 3.0, 7.0], 2, False, 0.4),
     ([1.0, 5.0, 3.0, 7.0], 2, True, 1.6)],
)  # fmt: skip
@pytest.mark.parametrize("loss_scaling", [None, 1024.0])
@pytest.mark.parametrize("strategy", ["Post", "Running"])
def test_worked_numbers(rows, replicas, sums, moved, loss_scaling, strategy):
    made = options(accumulation=2, replicas=replicas, sums=sums)
    made.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy[strategy])
    model = Given([10.0])
    training = poptorch.trainingModel(model, made, o.SGD(model.parameters(), lr=0.1, loss_scaling=loss_scaling))
    loss = training(torch.tensor(rows)[:, None])
    assert model.w.item() == pytest.approx(10.0 - moved, abs=1e-5)
    assert loss.flatten()[-1].item() == 10.0 * rows[-1]  # what is returned is not scaled


def test_changes_of_the_combined_variant_show_one_update_late():
    model = Given([1.0])
    optimizer = o.SGD(model.parameters(), lr=1.0, momentum=0.5, use_combined_accum=True)
    training = poptorch.trainingModel(model, options(), optimizer)
    training(torch.ones(1, 1))  # w = 0, and v = 0.5 is carried over
    optimizer.param_groups[0]["momentum"] = 0.0
    training.setOptimizer(optimizer)
    training(torch.ones(1, 1))  # the old momentum still counts: v = 0.5 + 1
    assert model.w.item() == pytest.approx(-1.5)
    training(torch.ones(1, 1))  # from here on there is none
    assert model.w.item() == pytest.approx(-2.5)


@pytest.mark.parametrize("kind", [o.Adam, o.AdamW, o.LAMB])
@pytest.mark.parametrize("accum", [torch.float16, torch.float32])
@pytest.mark.parametrize("first", [torch.float16, torch.float32])
@pytest.mark.parametrize("second", [torch.float16, torch.float32])
def test_types_of_the_state(kind, accum, first, second):
    model = Given()
    optimizer = kind(
        model.parameters(),
        lr=0.01,
        accum_type=accum,
        first_order_momentum_accum_type=first,
        second_order_momentum_accum_type=second,
    )
    training = poptorch.trainingModel(model, options(accumulation=2).runSideBySide(False), optimizer)
    before = model.w.detach().clone()
    training(torch.randn(2, 3))
    state = optimizer.state[model.w]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype, state["step"].dtype) == (first, second, torch.float32)
    accumulators = [tensor.dtype for tensor in training._session._bound.accumulators]
    assert accum in accumulators
    assert not torch.equal(model.w, before)


@pytest.mark.parametrize("accum", [torch.float16, torch.float32])
@pytest.mark.parametrize("velocity", [torch.float16, torch.float32])
def test_types_of_sgd(accum, velocity):
    model = Given()
    optimizer = o.SGD(model.parameters(), lr=0.1, momentum=0.9, accum_type=accum, velocity_accum_type=velocity)
    poptorch.trainingModel(model, options(accumulation=2), optimizer)(torch.randn(2, 3))
    assert optimizer.state[model.w]["momentum_buffer"].dtype == velocity


def test_float16_parameters_have_float32_moments_and_stay_float16():
    model = Given(dtype=torch.float16)
    optimizer = o.Adam(model.parameters(), lr=0.1)
    poptorch.trainingModel(model, options(), optimizer)(torch.ones(1, 3, dtype=torch.float16))
    assert model.w.dtype == torch.float16
    assert optimizer.state[model.w]["exp_avg"].dtype == torch.float32
