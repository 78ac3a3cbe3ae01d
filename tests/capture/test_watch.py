"""What a trace makes of derivatives that forward takes, and of random numbers that come from elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Apply


def run(function, *args, engine: str = "eager"):
    return poptorch.inferenceModel(Apply(function), poptorch.Options().engine(engine))(*args)


def wave(z):
    return (z.sin() * z.roll(1)).sum()


DERIVATIVES = {
    "hessian": torch.func.hessian(wave),
    "hessian of each row": lambda x: torch.func.vmap(torch.func.hessian(wave))(x.view(2, 2)),
    "hessian of a sum": torch.func.hessian(torch.sum),
    "forward mode": lambda x: torch.func.jvp(wave, (x,), (torch.ones_like(x),))[1],
    "jacobian by forward mode": torch.func.jacfwd(lambda z: torch.stack([z.sum(), z[0] * 0 + 1])),
    "vectorised jacobian": lambda x: torch.autograd.functional.jacobian(
        lambda z: z.sin() * z.roll(1), x, vectorize=True, strategy="forward-mode"
    ),
}


@pytest.mark.inductor
def test_derivatives_may_be_taken_in_forward(engine):
    x = torch.randn(4)
    found = run(lambda x: tuple(derive(x) for derive in DERIVATIVES.values()), x, engine=engine)
    for name, value, derive in zip(DERIVATIVES, found, DERIVATIVES.values(), strict=True):
        torch.testing.assert_close(value, derive(x), msg=name)


class Curvature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x):
        curvature = torch.func.vmap(torch.func.hessian(lambda z: self.net(z).sum()))(x)
        return F.mse_loss(curvature, torch.ones_like(curvature))


@pytest.mark.inductor
def test_a_loss_of_second_derivatives_is_trained(engine):
    torch.manual_seed(0)
    model, x = Curvature(), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    training = poptorch.trainingModel(
        model, poptorch.Options().engine(engine), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        training(x)
        optimizer.zero_grad()
        twin(x).backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_a_trace_inside_forward_is_refused_with_the_line():
    with pytest.raises(poptorch.Error, match=r"make_fx(?s:.*)torch\.func\.linearize\(torch\.sin"):
        run(lambda x: torch.func.linearize(torch.sin, x)[1](x), torch.ones(2))


@pytest.mark.parametrize("reads_a_value", [False, True])
def test_generators_of_the_user_draw_what_they_would_without_a_trace(reads_a_value):
    own, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)

    def forward(x):
        if reads_a_value and x.sum() > 5:
            return x
        return x + torch.rand(3, generator=own)

    model = poptorch.inferenceModel(Apply(forward))
    for _ in range(2):
        assert torch.equal(model(torch.zeros(3)), torch.rand(3, generator=other))
