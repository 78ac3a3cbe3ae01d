"""Between backward pass and update: clipping, loss scaling by hand and by itself, and several optimisers."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import poptorch
from optim.banks import Given, options

o = poptorch.optim


class Two(nn.Module):
    """Two parameters whose gradients are the two halves of the row."""

    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2, dtype=dtype))
        self.b = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, x):
        return poptorch.identity_loss((self.a * x[0, :2]).sum() + (self.b * x[0, 2:]).sum(), reduction="sum")


def clip_norm(made):
    made.Training.clipGradNorm(1.0)


def clip_one_norm(made):
    made.Training.clipGradNorm(1.0, norm_type=1.0)


def clip_value(made):
    made.Training.clipGradValue(0.5)


@pytest.mark.parametrize("clip", [clip_norm, clip_one_norm, clip_value])
@pytest.mark.parametrize("kind", [torch.optim.SGD, o.Adam])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping_is_that_of_torch(clip, kind, accumulation):
    model = Two()
    twin = copy.deepcopy(model)
    made = options(accumulation=accumulation)
    clip(made)
    training = poptorch.trainingModel(model, made, kind(model.parameters(), lr=0.1))
    reference = kind(twin.parameters(), lr=0.1)
    for seed in range(4):
        rows = torch.randn(accumulation, 4, generator=torch.Generator().manual_seed(seed))
        training(rows)
        mean = rows.mean(0)
        twin.a.grad, twin.b.grad = mean[:2].clone(), mean[2:].clone()
        if clip is clip_value:
            nn.utils.clip_grad_value_(twin.parameters(), 0.5)
        else:
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0, norm_type=2.0 if clip is clip_norm else 1.0)
        reference.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))


@pytest.mark.parametrize("value", [0, -1.0, "much", True])
def test_limits_are_positive_numbers(value):
    with pytest.raises(AssertionError, match="takes a positive number"):
        options().Training.clipGradNorm(value)
    with pytest.raises(AssertionError, match="takes a positive number"):
        options().Training.clipGradValue(value)


# ---- several optimisers


def two_optimizers(model):
    return [torch.optim.Adam([model.a], lr=0.1), o.SGD([model.b], lr=0.5, momentum=0.9)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_optimiser_updates_its_own_parameters(accumulation):
    model = Two()
    twin = copy.deepcopy(model)
    optimizers, references = two_optimizers(model), two_optimizers(twin)
    training = poptorch.trainingModel(model, options(accumulation=accumulation), optimizers)
    for seed in range(5):
        rows = torch.randn(accumulation, 4, generator=torch.Generator().manual_seed(seed))
        training(rows)
        twin.a.grad, twin.b.grad = rows.mean(0)[:2].clone(), rows.mean(0)[2:].clone()
        for reference in references:
            reference.step()
        if seed == 2:
            optimizers[1].param_groups[0]["lr"] = references[1].param_groups[0]["lr"] = 0.1
            training.setOptimizer(optimizers)
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert set(optimizers[0].state) == {model.a}
    assert set(optimizers[1].state) == {model.b}


def test_optimisers_share_no_parameter():
    model = Two()
    both = [o.SGD(model.parameters(), lr=0.1), o.SGD([model.b], lr=0.1)]
    with pytest.raises(AssertionError, match="belongs to optimiser 0 and to optimiser 1"):
        poptorch.trainingModel(model, options(), both)


def test_optimisers_agree_on_the_loss_scaling():
    model = Two()
    both = [o.SGD([model.a], lr=0.1, loss_scaling=2.0), o.SGD([model.b], lr=0.1)]
    with pytest.raises(AssertionError, match="different loss scalings"):
        poptorch.trainingModel(model, options(), both)


def test_the_number_of_optimisers_is_compiled():
    model = Two()
    training = poptorch.trainingModel(model, options(), two_optimizers(model))
    training(torch.ones(1, 4))
    with pytest.raises(poptorch.Error, match=r"compiled with 2 optimiser\(s\)"):
        training.setOptimizer(torch.optim.Adam(model.parameters()))


# ---- automatic loss scaling


def automatic(**shape):
    made = options(**shape)
    made.Training.setAutomaticLossScaling(True)
    return made


def factor(optimizer):
    return optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"]


@pytest.mark.parametrize("kind", [o.SGD, o.Adam, o.AdamW, o.RMSprop, o.LAMB])
@pytest.mark.parametrize("loss_scaling", [1.0, 2.0])
def test_the_scale_of_a_run_is_the_one_read_before_it(kind, loss_scaling):
    # statement 84
    model = Given(dtype=torch.float16)
    optimizer = kind(model.parameters(), lr=0.01, loss_scaling=loss_scaling)
    made = automatic()
    made.anchorTensor("scale", "finalLossScale")
    made.anchorTensor("gradient", "Gradient___w")
    training = poptorch.trainingModel(model, made, optimizer)
    row = torch.full((1, 3), 0.5, dtype=torch.float16)
    training.compile(row)
    assert "finalLossScale" in training.getTensorNames()
    for _ in range(5):
        before = factor(optimizer)
        training(row)
        assert training.getAnchoredTensor("scale") == loss_scaling * before
        assert training.getAnchoredTensor("gradient").tolist() == [0.5 * loss_scaling * before] * 3
        assert factor(optimizer) == 2 * before


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_final_scale_of_a_fixed_loss_scaling(accumulation):
    model = Given()
    made = options(accumulation=accumulation)
    made.anchorTensor("scale", "finalLossScale")
    optimizer = o.SGD(model.parameters(), lr=0.01, loss_scaling=16.0)
    training = poptorch.trainingModel(model, made, optimizer)
    for scale in (16.0, 32.0):
        optimizer.loss_scaling = scale
        training.setOptimizer(optimizer)
        training(torch.ones(accumulation, 3))
        assert training.getAnchoredTensor("scale").flatten()[-1] == scale


def test_the_update_is_that_of_the_unscaled_gradient():
    model, twin = Given(), Given()
    first = poptorch.trainingModel(model, automatic(), o.Adam(model.parameters(), lr=0.1))
    second = poptorch.trainingModel(twin, options(), o.Adam(twin.parameters(), lr=0.1))
    for seed in range(6):
        rows = torch.randn(1, 3, generator=torch.Generator().manual_seed(seed))
        first(rows)
        second(rows)
    torch.testing.assert_close(model.w, twin.w)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_overflow_halves_the_scale_and_skips_the_update(accumulation):
    model = Given(dtype=torch.float16)
    optimizer = o.Adam(model.parameters(), lr=0.01, loss_scaling=1024.0)
    training = poptorch.trainingModel(model, automatic(accumulation=accumulation), optimizer)
    small = torch.full((accumulation, 3), 0.01, dtype=torch.float16)
    training(small)
    before, step, scale = model.w.detach().clone(), optimizer.state[model.w]["step"].item(), factor(optimizer)
    training(torch.full((accumulation, 3), 1000.0, dtype=torch.float16))
    assert torch.equal(model.w, before)
    assert optimizer.state[model.w]["step"] == step
    assert torch.isfinite(optimizer.state[model.w]["exp_avg"]).all()
    assert factor(optimizer) == scale / 2
    training(small)
    assert not torch.equal(model.w, before)
    assert optimizer.state[model.w]["step"] == step + 1


class Classes(nn.Module):
    """A small classifier, whose loss has the type of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.scores = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(0.1 * self.scores(torch.tanh(self.hidden(x))), labels)


@pytest.mark.inductor
@pytest.mark.parametrize("loss_scaling", [1.0, 60000.0])
def test_the_scale_stays_within_the_type_of_the_loss(loss_scaling, engine):
    """65536 is no float16: the scale stops before it, and every update counts, on both engines."""
    model = Classes().half()
    made = automatic(engine=engine)
    made.anchorTensor("scale", "finalLossScale")
    optimizer = o.Adam(model.parameters(), lr=1e-3, loss_scaling=loss_scaling)
    training = poptorch.trainingModel(model, made, optimizer)
    generator = torch.Generator().manual_seed(1)
    scales: list[float] = []
    for _ in range(40):
        training(torch.randn(16, 8, generator=generator).half(), torch.randint(0, 3, (16,), generator=generator))
        scales.append(training.getAnchoredTensor("scale").item())
    assert optimizer.state[model.hidden.weight]["step"] == 40
    assert max(scales) <= 65504
    for before, after in itertools.pairwise(scales):
        growth = 2.0 if before < 4096 else 2.0 ** (1 / 256)
        expected = before * growth if before * growth <= 65504 else before
        assert after == pytest.approx(expected, rel=1e-5)


@pytest.mark.inductor
def test_a_gradient_that_float16_cannot_hold_is_skipped_on_every_engine(engine):
    """Native code keeps more digits on the way, and might go on with a gradient that is infinite in float16."""
    model = Given(dtype=torch.float16)
    optimizer = o.SGD(model.parameters(), lr=1.0, loss_scaling=1024.0)
    training = poptorch.trainingModel(model, automatic(engine=engine), optimizer)
    before = model.w.detach().clone()
    training(torch.full((1, 3), 100.0, dtype=torch.float16))
    assert torch.equal(model.w, before)
    assert factor(optimizer) == 0.5
    training(torch.full((1, 3), 0.5, dtype=torch.float16))
    assert torch.equal(model.w, before - 0.5)


def test_the_scale_doubles_up_to_4096_and_then_grows_slowly():
    model = Given()
    optimizer = o.SGD(model.parameters(), lr=0.0)
    training = poptorch.trainingModel(model, automatic(), optimizer)
    for _ in range(20):
        training(torch.full((1, 3), 1e-6))
    assert factor(optimizer).item() == pytest.approx(4096 * 2.0 ** (8 / 256))


@pytest.mark.parametrize("loss_scaling", [65536.0, 1e-6])
def test_a_loss_scaling_that_the_loss_cannot_hold(loss_scaling):
    """Every gradient would be infinite, or zero."""
    model = Given(dtype=torch.float16)
    row = torch.ones(1, 3, dtype=torch.float16)
    optimizer = o.SGD(model.parameters(), lr=0.1, loss_scaling=loss_scaling)
    with pytest.raises(poptorch.Error, match=r"loss_scaling is .*, but the loss is torch\.float16"):
        poptorch.trainingModel(model, options(), optimizer)(row)
    model = Given(dtype=torch.float16)
    optimizer = o.SGD(model.parameters(), lr=0.1, loss_scaling=32768.0)
    training = poptorch.trainingModel(model, options(), optimizer)
    training(row)
    optimizer.loss_scaling = loss_scaling
    with pytest.raises(poptorch.Error, match=r"loss_scaling is .*, but the loss is torch\.float16"):
        training.setOptimizer(optimizer)
    optimizer.loss_scaling = 2.0
    training.setOptimizer(optimizer)
    training(row)


def test_large_gradients_halve_the_scale_before_they_overflow():
    model = Given()
    optimizer = o.SGD(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, automatic(), optimizer)
    before = model.w.detach().clone()
    training(torch.full((1, 3), 10000.0))
    assert factor(optimizer) == 0.5
    assert not torch.equal(model.w, before)


def test_the_scale_survives_a_checkpoint():
    model = Given()
    optimizer = o.SGD(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, automatic(), optimizer)
    for _ in range(3):
        training(torch.ones(1, 3))
    saved = copy.deepcopy(optimizer.state_dict())
    training.destroy()
    again = o.SGD(model.parameters(), lr=0.01)
    again.load_state_dict(saved)
    poptorch.trainingModel(model, automatic(), again).compile(torch.ones(1, 3))
    assert factor(again) == 8.0


def test_loss_scaling_may_change_when_it_is_automatic():
    model = Given()
    optimizer = o.SGD(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, automatic(), optimizer)
    training(torch.ones(1, 3))
    optimizer.loss_scaling = 4.0
    training.setOptimizer(optimizer)


class Plain(torch.optim.Optimizer):
    """A step of the user's own, which sees gradients in the type of the parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            assert p.grad.dtype == p.dtype
            p.addcmul_(p.grad, torch.ones_like(p), value=-self.param_groups[0]["lr"])


@pytest.mark.inductor
@pytest.mark.parametrize("kind", [torch.optim.SGD, Plain])
def test_the_mean_of_half_gradients_whose_sum_is_no_half(kind, engine):
    """64 times 2000 is beyond float16, 2000 is not."""
    model = Given([1000.0], dtype=torch.float16)
    training = poptorch.trainingModel(
        model, options(accumulation=32, replicas=2, engine=engine), kind(model.parameters(), lr=0.25)
    )
    training(torch.full((64, 1), 2000.0, dtype=torch.float16))
    assert model.w.tolist() == [500.0]


# ---- failures


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_failed_step_changes_neither_weights_nor_state(accumulation, monkeypatch):
    """An engine that dies between computing and writing leaves everything as it was."""
    model = Two()
    optimizers = two_optimizers(model)
    training = poptorch.trainingModel(model, options(accumulation=accumulation), optimizers)
    training(torch.ones(accumulation, 4))
    before = copy.deepcopy([model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)])

    def fail(*args):
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", fail)
        with pytest.raises(MemoryError):
            training(torch.ones(accumulation, 4))
    now = [model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)]
    torch.testing.assert_close(now, before, rtol=0, atol=0)
    training(torch.ones(accumulation, 4))


def test_few_updates_are_skipped_when_small_gradients_meet_a_float16_loss():
    """Its scale ends at 65504, however small the gradients of the parameters are."""
    model = Given(values=(0.0, 0.0, 0.0))
    training = poptorch.trainingModel(model, automatic(), o.SGD(model.parameters(), lr=1.0))
    rows = torch.full((1, 3), 1e-4, dtype=torch.float16)
    for _ in range(300):
        training(rows)
    assert model.w[0].item() == pytest.approx(-300 * rows[0, 0].item(), rel=0.02)
