"""The device's random numbers: a stream per replica, apart from the host's."""

from __future__ import annotations

import pytest
import torch

import poptorch
from poptorch.runtime.random import RandomStreams


def draw(streams: RandomStreams, replicas: list[int]) -> list[float]:
    return [torch.rand(1, generator=streams.generators[replica]).item() for replica in replicas]


def test_streams_with_the_same_seed_are_equal():
    assert draw(RandomStreams(3, 2), [0, 1, 0, 1]) == draw(RandomStreams(3, 2), [0, 1, 0, 1])


def test_streams_of_replicas_are_independent_of_each_other():
    first = draw(RandomStreams(3, 2), [0, 0, 0])
    interleaved = draw(RandomStreams(3, 2), [0, 1, 0, 1, 0])
    assert interleaved[::2] == first
    assert not set(interleaved[1::2]) & set(first)


def test_a_stream_goes_on_where_it_stopped():
    streams, whole = RandomStreams(3, 1), draw(RandomStreams(3, 1), [0, 0])
    assert [*draw(streams, [0]), *draw(streams, [0])] == whole


def test_the_hosts_generator_is_left_alone():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    draw(RandomStreams(3, 2), [0, 1])
    assert torch.equal(torch.rand(2), expected)


def test_negative_seed():
    draw(RandomStreams(-1, 1), [0])


class Draws(torch.nn.Module):
    """Numbers of every kind, with one in the middle that depends on data."""

    def forward(self, x):
        dropped = torch.nn.functional.dropout(x, 0.3) + torch.bernoulli(x * 0.5)
        integers = torch.randint(0, 9, x.shape) + torch.randint_like(x, 2, 7) + torch.randperm(len(x))
        return dropped + torch.randn_like(x) + torch.rand(x.shape) + integers + torch.empty_like(x).exponential_()


def test_both_engines_draw_the_same_numbers():
    results = []
    for engine in ("eager", "inductor"):
        options = poptorch.Options().engine(engine).randomSeed(3).replicationFactor(2)
        model = poptorch.inferenceModel(Draws(), options)
        results.append(torch.stack([model(torch.ones(8)) for _ in range(2)]))
    torch.testing.assert_close(*results)
    assert len(results[0].unique()) == results[0].numel()


class DrawsForTurned(torch.nn.Module):
    """Dropout of tensors whose rows are columns in memory, before and after numbers that depend on data."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.weight, self.after = torch.nn.Parameter(torch.ones(3)), after

    def forward(self, x):
        turned = (torch.bernoulli(x * 0.5) + 1 if self.after else x).t()
        dropped = torch.nn.functional.dropout(turned, 0.5) + torch.empty_like(turned).normal_()
        wide = torch.nn.functional.dropout(turned[:, None].expand(-1, 2, -1), 0.5)
        return dropped.t(), poptorch.identity_loss((wide[:, 0].t() * self.weight).sum(), reduction="none")


@pytest.mark.parametrize("after", [False, True])
def test_both_engines_draw_the_same_numbers_for_tensors_of_any_layout(after):
    results = []
    for engine, together in (("eager", False), ("eager", not after), ("inductor", False), ("inductor", not after)):
        options = poptorch.Options().engine(engine).randomSeed(3).replicationFactor(2).runSideBySide(together)
        model = DrawsForTurned(after)
        training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
        results.append([torch.stack([training(torch.ones(8, 3))[0] for _ in range(2)]), model.weight.detach()])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@pytest.mark.inductor
def test_numbers_that_are_returned_stay_what_they_are(engine):
    class Returned(torch.nn.Module):
        def forward(self, x):
            drawn = torch.rand_like(x)
            return drawn, drawn.view(2, 2), x + drawn

    model = poptorch.inferenceModel(Returned(), poptorch.Options().engine(engine))
    kept = model(torch.zeros(4))
    before = [result.clone() for result in kept]
    other = model(torch.zeros(4))
    assert all(map(torch.equal, kept, before))
    assert not torch.equal(other[0], kept[0])
    assert torch.equal(kept[0].view(2, 2), kept[1])


@pytest.mark.inductor
def test_draws_that_depend_on_data_leave_the_hosts_generator_alone(engine):
    class Sampled(torch.nn.Module):
        def forward(self, x):
            chosen = torch.multinomial(x, 2) + torch.bernoulli(x / 10).sum()
            return chosen + torch.poisson(x).sum() + torch.nn.functional.rrelu(-x, training=True).sum()

    models = [
        poptorch.inferenceModel(Sampled(), poptorch.Options().engine(engine).randomSeed(seed)) for seed in (3, 3, 4)
    ]
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, again, other = [torch.stack([model(torch.arange(1.0, 6.0)) for _ in range(5)]) for model in models]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.rand(3), expected)


def test_streams_are_counted_over_all_processes():
    alone = draw(RandomStreams(3, 4), [0, 1, 2, 3])
    assert draw(RandomStreams(3, 2), [0, 1]) + draw(RandomStreams(3, 2, process=1), [0, 1]) == alone
