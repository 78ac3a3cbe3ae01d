"""Buffers that the host updates, and buffers of replicas."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch


class TwoBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer_1", torch.ones(3))
        self.register_buffer("buffer_2", torch.ones(3))

    def forward(self, x):
        return torch.sum(x + self.buffer_1 + self.buffer_2)


def infer(module: nn.Module, names: list[str] | None) -> poptorch.PoplarExecutor:
    options = poptorch.Options().engine("eager")
    return poptorch.inferenceModel(module, options if names is None else options.updatableNamedBuffers(names))


@pytest.mark.parametrize(("names", "second"), [(["buffer_1"], 12.0), (["buffer_1", "buffer_2"], 15.0)])
def test_named_buffers_are_copied_and_others_are_not(names, second, caplog):
    module, x = TwoBuffers(), torch.ones(3)
    model = infer(module, names)
    assert model(x) == 9.0
    module.buffer_1 += 1
    model.copyNamedBuffersToDevice()
    assert model(x) == 12.0
    module.buffer_2 += 1
    model.copyNamedBuffersToDevice()
    assert model(x) == second


def test_without_names_nothing_is_copied():
    module, x = TwoBuffers(), torch.ones(3)
    model = infer(module, None)
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        model.copyNamedBuffersToDevice()
    assert model(x) == 9.0
    with pytest.raises(poptorch.Error, match="updatableNamedBuffers"):
        model.copyNamedBuffersToDevice()
    assert model(x) == 9.0


def test_unknown_buffer_names_the_nearest():
    with pytest.raises(poptorch.Error, match=r"no such buffer.*buffer_1"):
        infer(TwoBuffers(), ["bufer_1"])(torch.ones(3))


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 2))
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        self.total += x
        return self.total, F.mse_loss(self.weight * x, x)


def train(module: nn.Module, options: poptorch.Options) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(module, options.engine("eager"), torch.optim.SGD(module.parameters(), lr=0.0))


def test_replicas_do_not_share_a_buffer_that_forward_changes():
    model = train(Summing(), poptorch.Options().replicationFactor(2))
    with pytest.raises(poptorch.Error, match=r"total(.|\n)*broadcastBuffers\(False\)"):
        model(torch.ones(2, 2))
    assert not model.isCompiled()


def test_every_replica_sums_up_its_own():
    options = poptorch.Options().replicationFactor(2).broadcastBuffers(False)
    model = train(Summing(), options)
    x = torch.tensor([[9.0, 9.0], [2.0, 2.0]])
    for _ in range(50):
        total, _ = model(x)
    torch.testing.assert_close(total, torch.tensor([[450.0, 450.0], [100.0, 100.0]]))


def test_constant_buffers_and_batch_norm_need_no_option():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("scale", torch.full((2,), 3.0))

        def forward(self, x):
            return F.mse_loss(self.norm(x) * self.scale, x)

    train(Normed(), poptorch.Options().replicationFactor(2))(torch.randn(8, 2))


def test_random_state_repeats_what_was_drawn():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    x = torch.zeros(4)
    for replicas in (1, 2):
        options = poptorch.Options().engine("eager").randomSeed(42).replicationFactor(replicas)
        model = poptorch.inferenceModel(Noise(), options)
        with pytest.raises(poptorch.Error, match="has not been compiled"):
            model.rng_state
        model.compile(x)
        assert model.rng_state == [42]
        model(x)
        state = model.rng_state
        assert state[0] == 42
        drawn = [model(x) for _ in range(3)]
        model.rng_state = state
        assert all(torch.equal(model(x), before) for before in drawn)
        with pytest.raises(poptorch.Error, match="rng_state has"):
            model.rng_state = state[:-1]


def test_random_state_without_seed_is_none_before_the_first_draw():
    model = poptorch.inferenceModel(nn.Dropout(), poptorch.Options().engine("eager"))
    model.compile(torch.ones(4))
    assert model.rng_state is None
