"""Integers of a graph lie where the analysis says, for every op that it knows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from poptorch.compiler.intervals import known_intervals
from poptorch.ir.ranges import within

FLOATS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def known(function, *inputs: torch.Tensor) -> tuple[int, int] | None:
    """What is known about the result of a function of integers between -3 and 5, and of floats."""
    graph = make_fx(lambda *xs: function(*(x.clamp(-3, 5) if not x.is_floating_point() else x for x in xs)))(*inputs)
    (result,) = graph.graph.output_node().all_input_nodes
    return known_intervals(graph.graph).get(result)


# Functions of two tensors of integers that are made of ops that the analysis follows.
STEPS = {
    "add": lambda a, b: a + b,
    "add a number": lambda a, b: a + 3,
    "subtract": lambda a, b: a - b,
    "from a number": lambda a, b: 2 - a,
    "multiply": lambda a, b: a * b,
    "negate": lambda a, b: -a,
    "magnitude": lambda a, b: a.abs(),
    "floor": lambda a, b: a // 2,
    "truncate": lambda a, b: torch.div(a, 3, rounding_mode="trunc"),
    "remainder": lambda a, b: a % 4,
    "bits": lambda a, b: a & 6,
    "clamp": lambda a, b: a.clamp(-2, 2),
    "at least": lambda a, b: a.clamp(min=1),
    "at most": lambda a, b: a.clamp_max(0),
    "between tensors": lambda a, b: a.clamp(b - 1, b + 1),
    "larger": lambda a, b: torch.maximum(a, b),
    "smaller": lambda a, b: torch.minimum(a, b),
    "choose": lambda a, b: torch.where(a > b, a, b + 1),
    "fill": lambda a, b: a.masked_fill(b > 0, 7),
    "join": lambda a, b: torch.cat([a, b + 2])[: len(a)],
    "stack": lambda a, b: torch.stack([a, b]).amax(0),
    "reorder": lambda a, b: a.flip(0).roll(1).view(2, 2).t().reshape(-1),
    "select": lambda a, b: a[b % 4],
    "sort": lambda a, b: a.sort().values,
    "sum": lambda a, b: a.sum().expand(4) + a.view(2, 2).sum(1).repeat(2),
    "cumulate": lambda a, b: a.cumsum(0),
    "pad": lambda a, b: F.pad(a, (1, 0), value=9)[:4],
    "narrow": lambda a, b: a.to(torch.int32).to(torch.int64),
    "scatter": lambda a, b: a.scatter(0, torch.tensor([1]), 8),
    "pieces": lambda a, b: torch.cat(a.split(2)[::-1]),
    "compare": lambda a, b: (a > b).long() + (a > b).sum(),
    "mark": lambda a, b: within(a.clamp(-1, 1), -1, 4, "op", "index"),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.booleans()), min_size=1, max_size=4),
    st.lists(st.integers(-3, 5), min_size=8, max_size=8),
)
def test_values_lie_in_the_interval(steps, numbers):
    def function(a, b):
        for name, swapped in steps:
            a, b = STEPS[name](*((b, a) if swapped else (a, b))), a
        return a

    a, b = torch.tensor(numbers).chunk(2)
    interval = known(function, a, b)
    assert interval is not None
    result = function(a, b)
    assert interval[0] <= result.min()
    assert result.max() <= interval[1]


KNOWN = {
    "argmax of a dimension": (lambda x: x.argmax(1), (0, 5)),
    "argmin of all": (lambda x: x.argmin(), (0, 23)),
    "topk": (lambda x: x.topk(2, 0).indices, (0, 3)),
    "argsort": (lambda x: x.argsort(1), (0, 5)),
    "max": (lambda x: x.max(0).indices, (0, 3)),
    "median": (lambda x: x.median(1).indices, (0, 5)),
    "cummax": (lambda x: x.cummax(0).indices, (0, 3)),
    "pooling": (lambda x: F.max_pool2d(x[None], 2, return_indices=True)[1], (0, 23)),
    "searchsorted": (lambda x: torch.searchsorted(torch.arange(3.0), x), (0, 3)),
    "bucketize": (lambda x: torch.bucketize(x, torch.arange(3.0)), (0, 3)),
    "multinomial": (lambda x: torch.multinomial(x.abs(), 3), (0, 5)),
    "randint": (lambda x: torch.randint(2, 9, (4,)), (2, 8)),
    "randint_like": (lambda x: torch.randint_like(x, 3, dtype=torch.int64), (0, 2)),
    "randperm": (lambda x: torch.randperm(5), (0, 4)),
    "arange": (lambda x: torch.arange(7, 1, -2), (3, 7)),
    "full": (lambda x: torch.full((3,), -4), (-4, -4)),
    "ones": (lambda x: torch.ones(3, dtype=torch.int32), (1, 1)),
    "bool": (lambda x: x > 0, (0, 1)),
    "bytes": (lambda x: x.to(torch.uint8), (0, 255)),
    "count": (lambda x: x.count_nonzero(), (0, 24)),
    "row of a mask": (lambda x: torch.nonzero_static(x > 0, size=3, fill_value=0).unbind(1)[0], (0, 3)),
    "column of a mask": (lambda x: torch.nonzero_static(x > 0, size=3, fill_value=0).unbind(1)[1], (0, 5)),
}


@pytest.mark.parametrize(("function", "expected"), KNOWN.values(), ids=KNOWN)
def test_integers_that_ops_make(function, expected):
    assert known(function, FLOATS) == expected


UNKNOWN = {
    "floats, which may not be numbers": lambda x: x.clamp(0, 3).long(),
    "too narrow a type": lambda x: (torch.arange(4) + 200).to(torch.int8).long(),
    "memory": lambda x: torch.arange(9)[2:4].as_strided((2,), (1,), 0),
    "product beyond 64 bits": lambda x: torch.full((2,), 2**40) * 2**40,
}


@pytest.mark.parametrize("function", UNKNOWN.values(), ids=UNKNOWN)
def test_what_could_be_anything_is_not_known(function):
    interval = known(function, FLOATS)
    assert interval is None or interval == (-128, 127)
