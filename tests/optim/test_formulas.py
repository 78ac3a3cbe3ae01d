"""PopTorch's optimisers against their formulas, evaluated in NumPy with float64 and nothing of ours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import poptorch
from optim.banks import Given, options

STEPS = 8
SHAPES = [(1, 1, False), (2, 2, False)]


def gradients(count):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(count, 3, generator=generator) for _ in range(STEPS)]


def sgd(w, grads, *, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
    v = np.zeros_like(w)
    for g in grads:
        if momentum == 0:
            w = w * (1 - lr * (1 - dampening) * weight_decay) - lr * (1 - dampening) * g
            continue
        v = momentum * v + (1 - dampening) * (g + weight_decay * w)
        w = w - lr * (g + weight_decay * w + momentum * v if nesterov else v)
    return w


def combined_sgd(w, grads, *, lr, momentum, dampening=0.0, weight_decay=0.0, velocity_scaling=1.0):
    v = (1 - dampening) * weight_decay * velocity_scaling * w
    for g in grads:
        v = v + (1 - dampening) * velocity_scaling * g
        w = w - lr / velocity_scaling * v
        v = momentum * v + (1 - dampening) * weight_decay * velocity_scaling * w
    return w


def adam(w, grads, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=False, corrects=True, limit=None):
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        g = g if decoupled else g + weight_decay * w
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        mean, variance = (m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)) if corrects else (m, v)
        x = mean / (np.sqrt(variance) + eps) + (weight_decay * w if decoupled else 0)
        trust = 1.0
        if limit is not None:
            weight_norm, norm = np.linalg.norm(w), np.linalg.norm(x)
            trust = min(weight_norm, limit) / norm if weight_norm and norm else 1.0
        w = w - lr * trust * x
    return w


def rmsprop(w, grads, *, lr, alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0, centered=False, tf=False):
    s, c, b = (np.ones_like(w) if tf else np.zeros_like(w)), np.zeros_like(w), np.zeros_like(w)
    for g in grads:
        g = g + weight_decay * w
        s = alpha * s + (1 - alpha) * g * g
        c = alpha * c + (1 - alpha) * g
        q = s - c * c if centered else s
        if tf:
            b = momentum * b + lr * g / np.sqrt(q + eps)
            w = w - b
        else:
            b = momentum * b + g / (np.sqrt(q) + eps)
            w = w - lr * b
    return w


def adamw(w, grads, **kwargs):
    return adam(w, grads, **{"weight_decay": 1e-2, **kwargs}, decoupled=True)


def lamb(w, grads, *, bias_correction=True, max_weight_norm=65500.0, **kwargs):
    return adamw(w, grads, **kwargs, corrects=bias_correction, limit=max_weight_norm)


o = poptorch.optim
CASES = [
    (o.SGD, sgd, {"lr": 0.1}),
    (o.SGD, sgd, {"lr": 0.1, "dampening": 0.3, "weight_decay": 0.1}),
    (o.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (o.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (o.Adam, adam, {"lr": 0.1}),
    (o.Adam, adam, {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-2, "weight_decay": 0.1}),
    (o.AdamW, adamw, {"lr": 0.1}),
    (o.AdamW, adamw, {"lr": 0.1, "weight_decay": 0.2}),
    (o.LAMB, lamb, {"lr": 0.1}),
    (o.LAMB, lamb, {"lr": 0.1, "bias_correction": False, "weight_decay": 0.2}),
    (o.LAMB, lamb, {"lr": 0.1, "max_weight_norm": 0.5}),
    (o.RMSprop, rmsprop, {"lr": 0.1}),
    (o.RMSprop, rmsprop, {"lr": 0.1, "centered": True, "momentum": 0.5, "weight_decay": 0.1, "alpha": 0.9}),
]
EXTRA = [
    (o.SGD, combined_sgd, {"use_combined_accum": True}, {"lr": 0.1, "momentum": 0.9, "velocity_scaling": 8.0}),
    (
        o.SGD,
        combined_sgd,
        {"use_combined_accum": True},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "velocity_scaling": 0.5},
    ),
    (o.RMSprop, rmsprop, {"use_tf_variant": True}, {"lr": 0.1, "momentum": 0.5}),
    (o.RMSprop, rmsprop, {"use_tf_variant": True}, {"lr": 0.1, "centered": True, "eps": 0.1}),
    (o.AdamW, adamw, {"bias_correction": False}, {"lr": 0.1}),  # corrected all the same
]
ALL = [(kind, formula, {}, settings) for kind, formula, settings in CASES] + EXTRA


@pytest.mark.parametrize(
    ("kind", "formula", "variant", "settings"),
    ALL,
    ids=[f"{k.__name__}-{'-'.join([*v, *s])}" for k, _, v, s in ALL],
)
@pytest.mark.parametrize("shape", SHAPES, ids=["G1R1", "G2R2"])
def test_formula(kind, formula, variant, settings, shape):
    accumulation, replicas, sums = shape
    count = accumulation * replicas
    model = Given()
    w0 = model.w.detach().double().numpy().copy()
    optimizer = kind(model.parameters(), **variant, **settings, loss_scaling=64.0)
    training = poptorch.trainingModel(
        model, options(accumulation=accumulation, replicas=replicas, sums=sums), optimizer
    )
    given = gradients(count)
    for rows in given:
        training(rows)
    reduced = [rows.double().numpy().sum(0) / (1 if sums else count) for rows in given]
    tf = {"tf": True} if "use_tf_variant" in variant else {}
    np.testing.assert_allclose(
        model.w.detach().double().numpy(), formula(w0, reduced, **settings, **tf), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("kind", [o.SGD, o.Adam, o.AdamW])
def test_max_grad_norm(kind):
    model = Given()
    w0 = model.w.detach().double().numpy().copy()
    training = poptorch.trainingModel(model, options(), kind(model.parameters(), lr=0.1, max_grad_norm=0.5))
    given = gradients(1)
    for rows in given:
        training(rows)
    clipped = []
    for rows in given:
        g = rows[0].double().numpy()
        clipped.append(g * 0.5 / max(0.5, np.linalg.norm(g)))
    formula = {o.SGD: sgd, o.Adam: adam, o.AdamW: adamw}[kind]
    np.testing.assert_allclose(model.w.detach().double().numpy(), formula(w0, clipped, lr=0.1), rtol=2e-5, atol=2e-6)


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
    training = poptorch.trainingModel(model, options(accumulation=2), optimizer)
    before = model.w.detach().clone()
    training(torch.randn(2, 3))
    state = optimizer.state[model.w]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype, state["step"].dtype) == (first, second, torch.float32)
    accumulators = [tensor.dtype for tensor in training._session._accumulators]
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
