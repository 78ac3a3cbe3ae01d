"""Running statistics of float16 norm layers are kept in float32, where they do not overflow."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch

EAGER = poptorch.Options().engine("eager")


class Normed(nn.Module):
    """A norm layer over large activations, and a loss that is small enough for float16."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.norm, self.scale = norm, nn.Parameter(torch.ones(1))

    def forward(self, x):
        y = self.norm(x * self.scale)
        return y, poptorch.identity_loss(y.float().pow(2).mean(), reduction="none")


def batch(*shape, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1000 + 300).half()


def train(model, options=EAGER):
    return poptorch.trainingModel(model, options.clone(), torch.optim.SGD(model.parameters(), lr=0.01))


def types(norm):
    return {norm.running_mean.dtype, norm.running_var.dtype}


NORMS = {
    "1d": (lambda: nn.BatchNorm1d(3), (8, 3)),
    "2d": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "3d": (lambda: nn.BatchNorm3d(3, affine=False), (4, 3, 2, 3, 3)),
    "cumulative": (lambda: nn.BatchNorm2d(3, momentum=None), (4, 3, 5, 5)),
    "instance": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (4, 3, 5, 5)),
}


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_statistics_are_those_of_float32(kind, accumulation):
    make, shape = NORMS[kind]
    wide = make()
    model = Normed(copy.deepcopy(wide)).half()
    options = EAGER.clone()
    options.Training.gradientAccumulation(accumulation)
    training = train(model, options)
    for seed in range(10):
        x = torch.cat([batch(*shape, seed=10 * seed + part) for part in range(accumulation)])
        training(x)
        for part in x.chunk(accumulation):
            wide(part.float() * model.scale.detach().float())
    assert types(model.norm) == {torch.float32}
    torch.testing.assert_close(model.norm.running_mean, wide.running_mean, rtol=0.02, atol=5)
    torch.testing.assert_close(model.norm.running_var, wide.running_var, rtol=0.02, atol=1)
    assert wide.running_var.max() > 65504


@pytest.mark.inductor
def test_statistics_on_every_engine(engine):
    """In training, in an inference model that was compiled before, and in one that is compiled afterwards."""
    wide = nn.BatchNorm2d(3)
    model = Normed(copy.deepcopy(wide)).half()
    options = poptorch.Options().engine(engine)
    early = poptorch.inferenceModel(model, options.clone()).eval()
    early(batch(4, 3, 5, 5))
    assert types(model.norm) == {torch.float16}  # an inference model changes nothing
    training = train(model, options)
    for seed in range(10):
        training(batch(4, 3, 5, 5, seed=seed))
        wide(batch(4, 3, 5, 5, seed=seed).float() * model.scale.detach().float())
    x = batch(4, 3, 5, 5, seed=99)
    torch.testing.assert_close(model.norm.running_var, wide.running_var, rtol=0.02, atol=1)
    wide.load_state_dict(model.norm.state_dict())
    expected = wide.eval()(x.float() * model.scale.detach().float())
    late = poptorch.inferenceModel(model, options.clone()).eval()
    for inference in (early, late):
        y, _ = inference(x)
        assert y.dtype == torch.float16
        torch.testing.assert_close(y.float(), expected, rtol=0.01, atol=0.01)


def test_half_of_a_model_that_is_trained_changes_nothing():
    """`half()` makes the statistics float16 again; the next call takes them back."""
    model = Normed(nn.BatchNorm1d(3)).half()
    training = train(model)
    training(batch(8, 3))
    before = model.norm.running_mean.clone()
    model.half()
    training(batch(8, 3))
    assert types(model.norm) == {torch.float32}
    expected = 0.9 * before + 0.1 * batch(8, 3).float().mean(0)
    torch.testing.assert_close(model.norm.running_mean, expected, rtol=0.01, atol=1)


def test_the_option_keeps_statistics_in_float16(caplog):
    options = EAGER.clone()
    options.Precision.runningStatisticsAlwaysFloat(False)
    assert "deprecated" in caplog.text
    model = Normed(nn.BatchNorm1d(3)).half()
    train(model, options)(batch(8, 3))
    assert types(model.norm) == {torch.float16}


def test_a_first_call_that_fails_leaves_the_types_alone():
    class Failing(Normed):
        def forward(self, x):
            super().forward(x)
            raise ValueError("not today")

    model = Failing(nn.BatchNorm1d(3)).half()
    with pytest.raises(ValueError, match="not today"):
        train(model)(batch(8, 3))
    assert types(model.norm) == {torch.float16}


def test_statistics_that_an_inference_model_hands_back():
    model = Normed(nn.BatchNorm1d(3)).half()
    inference = poptorch.inferenceModel(model, EAGER.clone()).train()
    for seed in range(20):
        inference(batch(8, 3, seed=seed))
    assert types(model.norm) == {torch.float16}
    inference.copyWeightsToHost()
    assert types(model.norm) == {torch.float32}
    assert torch.isfinite(model.norm.running_var).all()
    assert model.norm.running_var.max() > 65504


def test_float32_layers_and_other_buffers_keep_their_types():
    model = Normed(nn.BatchNorm1d(3))
    model.register_buffer("running_var", torch.ones(1, dtype=torch.float16))
    model.forward = lambda x: Normed.forward(model, x * model.running_var.float())
    train(model)(batch(8, 3).float())
    assert types(model.norm) == {torch.float32}
    assert model.running_var.dtype == torch.float16


def test_a_norm_that_two_parents_share():
    norm = nn.BatchNorm1d(3)
    model = Normed(nn.Sequential(norm, norm)).half()
    train(model)(batch(8, 3))
    assert types(norm) == {torch.float32}
    assert model.norm[0] is model.norm[1]
