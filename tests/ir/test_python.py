"""A graph becomes a Python function whatever its ops and arguments print as."""

from __future__ import annotations

import math
import operator
import weakref

import pytest
import torch
from torch import fx

from poptorch.ir.python import as_function

aten = torch.ops.aten


def result_of(target, *args, **kwargs):
    """What a graph of one call gives; an argument that is "x" stands for a tensor of ones."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    replace = {"x": x}
    args = [replace.get(arg, arg) if isinstance(arg, str) else arg for arg in args]
    graph.output((graph.call_function(target, tuple(args), kwargs),))
    (result,) = as_function(graph)(torch.ones(3))
    return result


def signs(number: complex) -> tuple[float, ...]:
    return math.copysign(1, number.real), math.copysign(1, number.imag)


@pytest.mark.parametrize("number", [complex(1.0, -0.0), complex(-0.0, -0.0), complex(-0.0, 0.0)])
def test_signs_of_complex_zeros_are_kept(number):
    assert signs(result_of(aten.full.default, [], number, dtype=torch.complex128).item()) == signs(number)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, complex(math.nan, -math.inf), -0.0, 1e-320])
def test_numbers_keep_their_values(number):
    found = result_of(aten.full.default, [], number, dtype=torch.complex128).item()
    assert repr(found) == repr(complex(number))


def test_an_overload_may_be_called_like_a_keyword():
    assert result_of(getattr(aten.random, "from"), "x", 5, 6).tolist() == [5.0] * 3


def test_an_argument_may_be_called_like_a_keyword():
    assert result_of(getattr(aten.random, "from"), "x", to=6, **{"from": 5}).tolist() == [5.0] * 3


def test_a_generator_is_handed_on():
    generator = torch.Generator().manual_seed(3)
    found = result_of(aten.rand.generator, [3], generator=generator)
    assert torch.equal(found, torch.rand(3, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (aten.div.Tensor_mode, ("x", 2), {"rounding_mode": "floor"}),
        (aten._to_copy.default, ("x",), {"dtype": torch.float16, "device": torch.device("cpu")}),
        (aten.clone.default, ("x",), {"memory_format": torch.contiguous_format}),
        (operator.getitem, ("x", (slice(None, 2), None)), {}),
    ],
    ids=["text", "types and devices", "memory formats", "slices"],
)
def test_arguments_of_all_kinds(target, args, kwargs):
    expected = target(torch.ones(3), *args[1:], **kwargs)
    torch.testing.assert_close(result_of(target, *args, **kwargs), expected)


def test_values_inside_lists_and_slices_are_found():
    graph = fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    joined = graph.call_function(aten.cat.default, ([x, x],))
    graph.output({"cut": graph.call_function(operator.getitem, (joined, (slice(n, None),))), "all": (joined,)})
    found = as_function(graph)(torch.arange(3), 4)
    assert found["cut"].tolist() == [1, 2]
    assert found["all"][0].tolist() == [0, 1, 2, 0, 1, 2]


def test_values_are_freed_after_their_last_use():
    alive: list[weakref.ref[torch.Tensor]] = []

    def make(x):
        alive.append(weakref.ref(result := x + 1))
        return result

    def count(x):
        return torch.tensor(sum(reference() is not None for reference in alive))

    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(make, (x,))
    second = graph.call_function(make, (first,))
    graph.call_function(make, (x,))
    graph.output(graph.call_function(count, (second,)))
    assert as_function(graph)(torch.ones(1)) == 1
