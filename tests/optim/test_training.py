"""Training with each optimiser against the step of the host."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from optim.banks import Given, options
from optim.kinds import ROW, VARIANTS, Classifier, Lin, name_of, o, small, wrap


@pytest.mark.parametrize(("kind", "extra"), VARIANTS, ids=map(name_of, VARIANTS))
def test_nothing_moves_without_a_learning_rate_until_it_is_set(kind, extra):
    """1, 2, 3, 5: lr 0 keeps the loss; a new lr counts after setOptimizer, not before, and then the model learns."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = kind(model.parameters(), lr=0.0, **extra)
    training = wrap(model, optimizer)
    batch = torch.randn(1, 10), torch.tensor([3])
    losses = [training(*batch)[1].item() for _ in range(3)]
    optimizer.param_groups[0]["lr"] = 0.01
    losses += [training(*batch)[1].item() for _ in range(2)]
    assert len(set(losses)) == 1
    training.setOptimizer(optimizer)
    for _ in range(300):
        out, loss = training(*batch)
        if loss < 0.03:
            break
    assert loss < 0.03
    assert out.argmax() == 3


@pytest.mark.parametrize(("kind", "extra"), VARIANTS, ids=map(name_of, VARIANTS))
def test_ten_steps_equal_the_step_of_the_host(kind, extra):
    """4, 5, 6: after every step the parameters are those that the optimiser's own step() gives."""
    torch.manual_seed(0)
    model = Lin()
    twin = copy.deepcopy(model)
    training = wrap(model, kind(model.parameters(), lr=0.01, **extra))
    reference = kind(twin.parameters(), lr=0.01, **extra)
    x = torch.randn(10)
    for _ in range(10):
        _, loss = training(x)
        reference.zero_grad()
        expected = (F.log_softmax(twin.lin(x), dim=0) ** 2).sum()
        expected.backward()
        reference.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))


@pytest.mark.parametrize("limit", [100.0, None])
def test_lamb_learns_with_and_without_a_weight_limit(limit):
    # statements 7, 8
    torch.manual_seed(0)
    model = Classifier()
    training = wrap(model, o.LAMB(model.parameters(), lr=0.01, max_weight_norm=limit))
    batch = torch.randn(1, 10), torch.tensor([3])
    losses = [training(*batch)[1].item() for _ in range(200)]
    assert losses[-1] < 0.03


def test_variants_of_rmsprop():
    """9, 10: without the flag and with False it is the same, with True it is not."""
    ends = []
    for flag in (None, False, True):
        model = Given()
        training = wrap(model, o.RMSprop(model.parameters(), lr=0.02, use_tf_variant=flag))
        for _ in range(5):
            training(ROW)
        ends.append(model.w.detach())
    assert torch.equal(ends[0], ends[1])
    assert not torch.allclose(ends[0], ends[2])


def test_nesterov_of_torch_runs():
    # statement 11
    training, _ = small(torch.optim.SGD, nesterov=True, momentum=0.1, lr=0.001)
    training(ROW)


@pytest.mark.parametrize("sums", [False, True])
def test_many_accumulated_gradients_learn(sums):
    # statement 12
    torch.manual_seed(0)
    model = Classifier()
    training = wrap(model, o.SGD(model.parameters(), lr=0.05), options(accumulation=20, sums=sums))
    batch = torch.randn(1, 10).expand(20, 10), torch.full((20,), 3)
    losses = [training(*batch)[1].item() for _ in range(60)]
    assert losses[-1] < 0.03


@pytest.mark.parametrize(("sums", "lr"), [(False, 0.01), (True, 0.02)])
def test_accumulation_equals_one_larger_batch(sums, lr):
    """13, 14: A=2 with lr 0.01 is A=1 with the same lr for Mean, and with twice the lr for Sum."""

    class L1(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(10, 10)

        def forward(self, x, target):
            y = self.fc(x)
            return y, F.l1_loss(y, target)

    ends = []
    for accumulation, rate in ((1, lr), (2, 0.01)):
        model = L1()
        training = wrap(model, o.SGD(model.parameters(), lr=rate), options(accumulation=accumulation, sums=sums))
        generator = torch.Generator().manual_seed(5)
        for _ in range(10):
            training(torch.randn(4, 10, generator=generator), torch.randn(4, 10, generator=generator))
        ends.append(dict(model.named_parameters()))
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize(
    ("kind", "twin"), [(o.SGD, torch.optim.SGD), (o.Adam, torch.optim.Adam), (o.AdamW, torch.optim.AdamW)]
)
def test_max_grad_norm_is_clip_grad_norm(kind, twin):
    # statement 15
    model = Given()
    reference = copy.deepcopy(model)
    training = wrap(model, kind(model.parameters(), lr=0.01, max_grad_norm=0.001))
    optimizer = twin(reference.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(5)
    for _ in range(10):
        rows = torch.randn(1, 3, generator=generator)
        training(rows)
        reference.w.grad = rows[0].clone()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.001)
        optimizer.step()
    torch.testing.assert_close(model.w, reference.w, rtol=0, atol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_max_grad_norm_limits_the_accumulated_gradient(replicas):
    """16, without the pipeline: what is limited is the reduced gradient, not that of each micro-batch."""
    model = Given()
    before = model.w.detach().clone()
    optimizer = o.SGD(model.parameters(), lr=1.0, max_grad_norm=0.001)
    rows = torch.randn(3 * replicas, 3, generator=torch.Generator().manual_seed(5))
    wrap(model, optimizer, options(accumulation=3, replicas=replicas))(rows)
    mean = rows.mean(0)
    torch.testing.assert_close(before - model.w.detach(), 0.001 * mean / mean.norm(), rtol=1e-3, atol=1e-6)


def test_without_an_optimiser_sgd_trains():
    # statement 17
    model = Given([1.0])
    training = poptorch.trainingModel(model, options())
    training(torch.ones(1, 1))
    assert isinstance(training._programs.optimizers.optimizers[0], o.SGD)
    assert model.w.item() == pytest.approx(0.99)


@pytest.mark.parametrize("only_last", [False, True])
def test_frozen_parameters_stay(only_last):
    # statements 18, 19
    model = Classifier()
    for parameter in model.first.parameters():
        parameter.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    trained = model.second.parameters() if only_last else model.parameters()
    training = wrap(model, o.SGD(trained, lr=0.1))
    for _ in range(3):
        training(torch.randn(1, 10), torch.tensor([3]))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"second.weight", "second.bias"}


def test_float16_input_and_float32_weights_learn():
    """95, with fewer steps: the loss keeps falling."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def forward(self, x, target):
            return F.mse_loss(self.fc(x.float()), target.float())

    torch.manual_seed(0)
    training = poptorch.trainingModel(Half(), options())
    batch = torch.randn(4, 4).half(), torch.randn(4, 1).half()
    losses = [training(*batch).item() for _ in range(300)]
    assert losses[-1] < 0.5 * losses[0]
