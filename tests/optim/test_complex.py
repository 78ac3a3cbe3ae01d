"""Complex parameters: every optimiser treats a complex number as a pair of real ones, as torch's do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch
from optim.banks import options

o = poptorch.optim


class Spectrum(nn.Module):
    """A complex and a real parameter; the gradient of the complex one arrives as a conjugated view."""

    def __init__(self, count: int = 1, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(3, 2, generator=generator, dtype=dtype) for _ in range(count)]
        self.w = nn.ParameterList(values)
        self.r = nn.Parameter(torch.randn(2, generator=generator))

    def weights(self):
        return sum(self.w)

    def forward(self, x):
        y = self.weights().conj() * x * (1 + 2j) + self.r
        return poptorch.identity_loss((y.abs() ** 2).sum(), reduction="none")


class Pairs(Spectrum):
    """The same with pairs of real numbers for parameters."""

    def __init__(self, count: int = 1, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__(count, dtype)
        self.w = nn.ParameterList([torch.view_as_real(w.detach()).clone() for w in self.w])

    def weights(self):
        return sum(torch.view_as_complex(w) for w in self.w)


def rows(seed: int, count: int = 1) -> torch.Tensor:
    return torch.randn(3 * count, 2, generator=torch.Generator().manual_seed(seed))


TORCHS = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.RMSprop, {"weight_decay": 0.1}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    *[
        (getattr(torch.optim, name), {})
        for name in ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
    ],
]
OURS = [
    (o.SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2, "loss_scaling": 64.0}),
    (o.SGD, {"momentum": 0.9, "weight_decay": 0.1, "use_combined_accum": True, "velocity_scaling": 4.0}),
    (o.SGD, {"max_grad_norm": 0.5}),
    (o.Adam, {"weight_decay": 0.1, "loss_scaling": 64.0, "max_grad_norm": 0.5}),
    (o.AdamW, {"max_grad_norm": 0.5}),
    (o.RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    (o.RMSprop, {"use_tf_variant": True}),
    (o.LAMB, {"weight_decay": 0.1}),
    (o.LAMB, {"bias_correction": False, "max_weight_norm": 0.5}),
]


def name_of(value):
    return ",".join(value) if isinstance(value, dict) else f"{value.__module__.partition('.')[0]}-{value.__name__}"


def plain_step(model, optimizer, x, count):
    optimizer.zero_grad()
    for part in x.chunk(count):
        (model(part) / count).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.resolve_conj()  # torch's optimisers cannot take such a view
    optimizer.step()


@pytest.mark.parametrize(("kind", "settings"), TORCHS, ids=name_of)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_torchs_optimisers_do_what_they_do_in_torch(kind, settings, accumulation):
    model = Spectrum()
    plain = copy.deepcopy(model)
    optimizer, reference = (kind(m.parameters(), lr=0.01, **settings) for m in (model, plain))
    training = poptorch.trainingModel(model, options(accumulation=accumulation), optimizer)
    for seed in range(5):
        training(rows(seed, accumulation))
        plain_step(plain, reference, rows(seed, accumulation), accumulation)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(optimizer.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-5)


def as_pairs(values):
    return {name: torch.view_as_real(v) if v.is_complex() else v for name, v in values.items()}


def check_against_pairs(make, made, count=1, engine="eager", steps=5, micro_batches=1):
    """Train both forms; parameters and state are the same numbers."""
    model, twin = Spectrum(count), Pairs(count)
    optimizer, reference = make(model.parameters()), make(twin.parameters())
    trainings = [
        poptorch.trainingModel(model, made(engine), optimizer),
        poptorch.trainingModel(twin, made("eager"), reference),
    ]
    for seed in range(steps):
        for training in trainings:
            training(rows(seed, micro_batches))
    torch.testing.assert_close(as_pairs(model.state_dict()), twin.state_dict(), rtol=1e-4, atol=1e-5)
    for parameter, pairs in zip(model.parameters(), twin.parameters(), strict=True):
        found, expected = as_pairs(optimizer.state[parameter]), reference.state[pairs]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return optimizer


@pytest.mark.parametrize(("kind", "settings"), OURS, ids=name_of)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_our_optimisers_see_pairs(kind, settings, accumulation):
    check_against_pairs(
        lambda p: kind(p, lr=0.01, **settings),
        lambda engine: options(accumulation=accumulation, engine=engine),
        micro_batches=accumulation,
    )


def test_replicas_see_pairs():
    check_against_pairs(
        lambda p: o.Adam(p, lr=0.01),
        lambda engine: options(accumulation=2, replicas=2, engine=engine),
        micro_batches=4,
    )


def test_automatic_loss_scaling_sees_pairs():
    def made(engine):
        chosen = options(engine=engine)
        chosen.Training.setAutomaticLossScaling(True)
        return chosen

    optimizer = check_against_pairs(lambda p: o.Adam(p, lr=0.01), made)
    assert optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"] > 1


@pytest.mark.inductor
@pytest.mark.parametrize("count", [1, 16])
def test_native_code_sees_pairs(count, engine):
    """Also where the update is cut into pieces."""
    check_against_pairs(
        lambda p: o.Adam(p, lr=0.01, weight_decay=0.1, max_grad_norm=0.5),
        lambda engine: options(accumulation=2, engine=engine),
        count=count,
        engine=engine,
        micro_batches=2,
    )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_by_norm_is_that_of_torch(norm_type):
    """The size of a complex gradient is its absolute value."""
    model = Spectrum()
    plain = copy.deepcopy(model)
    made = options()
    made.Training.clipGradNorm(0.5, norm_type=norm_type)
    training = poptorch.trainingModel(model, made, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(3):
        training(rows(seed))
        reference.zero_grad()
        plain(rows(seed)).backward()
        plain.w[0].grad = plain.w[0].grad.resolve_conj()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type=norm_type)
        reference.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_clipping_by_value_is_refused():
    """As in torch, which cannot compare complex numbers either."""
    model = Spectrum()
    made = options()
    made.Training.clipGradValue(0.5)
    with pytest.raises(poptorch.Error, match="clipGradValue cannot limit them"):
        poptorch.trainingModel(model, made, torch.optim.SGD(model.parameters(), lr=0.1))(rows(0))


def test_adafactor_refuses_complex_parameters():
    """As in torch."""
    model = Spectrum()
    with pytest.raises(poptorch.Error, match="Adafactor does not support complex parameters"):
        poptorch.trainingModel(model, options(), torch.optim.Adafactor(model.parameters()))(rows(0))


@pytest.mark.parametrize("name", ["accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type"])
def test_nothing_complex_is_kept_in_float16(name):
    model = Spectrum()
    optimizer = o.Adam(model.parameters(), lr=0.1, **{name: torch.float16})
    with pytest.raises(poptorch.Error, match="cannot be kept in float16"):
        poptorch.trainingModel(model, options(accumulation=2), optimizer)(rows(0, 2))


def test_double_precision_stays():
    model, twin = Spectrum(dtype=torch.complex128), Pairs(dtype=torch.complex128)
    for each in (model, twin):
        poptorch.trainingModel(each, options(), torch.optim.Adam(each.parameters(), lr=0.01))(rows(0))
    assert model.w[0].dtype == torch.complex128
    torch.testing.assert_close(as_pairs(model.state_dict()), twin.state_dict())


def test_the_step_of_lamb_on_the_host_sees_pairs():
    model, twin = Spectrum(), Pairs()
    for each in (model, twin):
        optimizer = o.LAMB(each.parameters(), lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            each(rows(seed)).backward()
            optimizer.step()
    torch.testing.assert_close(as_pairs(model.state_dict()), twin.state_dict())


def test_a_step_of_the_users_own_sees_complex_numbers():
    class Phase(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.sub_(0.1 * p.grad / (p.grad.abs() + 1))

    model = Spectrum()
    plain = copy.deepcopy(model)
    training, reference = poptorch.trainingModel(model, options(), Phase(model.parameters())), Phase(plain.parameters())
    for seed in range(3):
        training(rows(seed))
        plain_step(plain, reference, rows(seed), 1)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
