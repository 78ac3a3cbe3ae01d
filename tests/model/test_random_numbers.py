"""Random numbers of a call, which replica draws which."""

from __future__ import annotations

import torch
from torch import nn

import poptorch
from model.executors import options


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def test_same_seed_same_numbers():
    def run():
        model = poptorch.inferenceModel(Noise(), options(D=2, R=2).randomSeed(42))
        return [model(torch.zeros(8)) for _ in range(2)]

    torch.testing.assert_close(run(), run(), rtol=0, atol=0)


def test_every_micro_batch_replica_and_call_draws_anew():
    model = poptorch.inferenceModel(Noise(), options(D=2, R=2).randomSeed(42))
    drawn = torch.cat([model(torch.zeros(8)) for _ in range(2)])
    assert len(drawn.unique()) == 16


def test_running_a_model_does_not_disturb_the_hosts_generator():
    model = poptorch.inferenceModel(Noise(), options())
    model(torch.zeros(2))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model(torch.zeros(2))
    assert torch.equal(torch.rand(3), expected)
