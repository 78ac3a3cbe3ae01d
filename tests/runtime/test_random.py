"""The device's random numbers: a stream per replica, apart from the host's."""

from __future__ import annotations

import torch

from poptorch.runtime.random import RandomStreams


def draw(streams: RandomStreams, replicas: list[int]) -> list[float]:
    with streams.active():
        numbers = []
        for replica in replicas:
            streams.enter(replica)
            numbers.append(torch.rand(1).item())
        return numbers


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
