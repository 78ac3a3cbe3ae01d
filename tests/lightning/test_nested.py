"""Nested values: their leaves, their names, and rebuilding them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import torch

from poptorch.lightning import nested


@dataclass(frozen=True)
class Pair:
    x: object
    y: object


Point = namedtuple("Point", "x y")


def names(value):
    return [name for name, _ in nested.leaves(value, "b")]


def test_names_say_where_a_leaf_is():
    value = [1, {"a": (2, None), 3: Pair(4, Point(5, 6))}]
    expected = ["b[0]", "b[1][a][0]", "b[1][a][1]", "b[1][3].x", "b[1][3].y[0]", "b[1][3].y[1]"]
    assert names(value) == expected


def test_a_leaf_alone():
    assert list(nested.leaves(7, "b")) == [("b", 7)]
    assert nested.parts(7) == [7]
    assert nested.parts({"a": 1, "b": [2]}) == [1, [2]]


def test_mapped_keeps_every_type():
    twice = lambda name, leaf: leaf * 2  # noqa: E731
    default = defaultdict(list, a=1)
    values = [
        [1, 2],
        (1, 2),
        Point(1, 2),
        Pair(1, (2,)),
        OrderedDict(a=1),
        default,
        UserDict(a=1),
        {"a": {"b": 1}},
    ]
    for value in values:
        result = nested.mapped(value, twice)
        assert type(result) is type(value)
        assert [leaf for _, leaf in nested.leaves(result, "")] == [2 * leaf for _, leaf in nested.leaves(value, "")]
    assert default == {"a": 1}
    assert nested.mapped(default, twice)["missing"] == []
    assert nested.mapped(MappingProxyType({"a": 1}), twice) == {"a": 2}


def test_the_function_is_told_the_names():
    assert nested.mapped({"a": [1]}, lambda name, leaf: name, "b") == {"a": ["b[a][0]"]}


def test_sizes_and_classes_are_leaves():
    assert names(torch.Size([1, 2])) == ["b"]
    assert names(Pair) == ["b"]
