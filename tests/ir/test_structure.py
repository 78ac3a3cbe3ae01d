"""Nested values: taking them apart and putting them together are inverse to each other."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poptorch.ir.structure import (
    CUSTOM_TYPES,
    ICustomArgParser,
    Leaf,
    flatten,
    flatten_like,
    leaf_names,
    map_leaves,
    rebuild,
)

Pair = namedtuple("Pair", "left right")

leaves = st.one_of(
    st.integers(0, 9).map(lambda n: torch.full((1,), float(n))), st.none(), st.integers(), st.text(max_size=3)
)
keys = st.text("abc", min_size=1, max_size=2)
nested = st.recursive(
    leaves,
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.lists(child, max_size=3).map(tuple),
        st.dictionaries(keys, child, max_size=3),
        st.dictionaries(keys, child, max_size=3).map(OrderedDict),
        st.tuples(child, child).map(lambda pair: Pair(*pair)),
    ),
    max_leaves=8,
)


def same(a, b) -> bool:
    """Equal in type, structure and contents, the tensors being the same objects."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(nested)
def test_rebuild_undoes_flatten(value):
    layout, tensors = flatten(value)
    assert same(rebuild(layout, tensors), value)


@given(nested)
def test_flatten_like_its_own_layout_gives_the_same_tensors(value):
    layout, tensors = flatten(value)
    again = flatten_like(layout, value)
    assert len(again) == len(tensors)
    assert all(a is b for a, b in zip(again, tensors, strict=True))


@given(nested)
def test_every_tensor_has_a_name_and_names_differ(value):
    layout, tensors = flatten(value)
    names = leaf_names(layout, "x")
    assert len(names) == len(tensors)
    assert len(set(names)) == len(names)


@given(nested)
def test_mapping_leaves_to_themselves_changes_nothing(value):
    layout, tensors = flatten(value)
    assert same(rebuild(map_leaves(layout, Leaf), tensors), value)


@given(st.dictionaries(keys, st.integers(0, 9), min_size=2, max_size=4))
def test_dictionaries_are_read_in_the_order_of_the_layout(numbers):
    value = {key: torch.tensor([float(number)]) for key, number in numbers.items()}
    layout, tensors = flatten(value)
    shuffled = dict(reversed(list(value.items())))
    assert all(a is b for a, b in zip(flatten_like(layout, shuffled), tensors, strict=True))


def test_tensors_come_depth_first():
    a, b, c = (torch.tensor([float(n)]) for n in range(3))
    layout, tensors = flatten([a, ({"k": b}, 7), c])
    assert [t.item() for t in tensors] == [0, 1, 2]
    assert leaf_names(layout, "x") == ["x[0]", "x[1][0][k]", "x[2]"]


def test_a_tensor_may_appear_twice():
    a = torch.ones(1)
    layout, tensors = flatten((a, a))
    assert len(tensors) == 2
    assert same(rebuild(layout, tensors), (a, a))


def test_dictionary_subclass_that_takes_no_mapping_is_rebuilt():
    value = defaultdict(list, {"a": torch.ones(1)})
    layout, tensors = flatten(value)
    assert rebuild(layout, tensors)["a"] is tensors[0]


class Graph:
    def __init__(self, nodes, edges):
        self.nodes, self.edges = nodes, edges


class GraphParser(ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.nodes
        yield struct.edges

    def reconstruct(self, original_structure, tensor_iterator):
        return Graph(next(tensor_iterator), next(tensor_iterator))


@pytest.fixture
def graphs():
    CUSTOM_TYPES.register(Graph, GraphParser())
    yield
    CUSTOM_TYPES.register(Graph, None)


def test_registered_types_are_taken_apart_and_rebuilt(graphs):
    value = Graph(torch.zeros(1), torch.ones(1))
    layout, tensors = flatten({"g": value})
    again = rebuild(layout, tensors)["g"]
    assert again is not value
    assert again.nodes is value.nodes
    assert again.edges is value.edges


def test_parser_of_a_base_class_serves_its_subclasses(graphs):
    class Tree(Graph):
        pass

    _, tensors = flatten(Tree(torch.zeros(1), torch.ones(1)))
    assert len(tensors) == 2


def test_without_a_parser_an_object_is_a_constant():
    value = Graph(torch.zeros(1), torch.ones(1))
    layout, tensors = flatten(value)
    assert tensors == []
    assert rebuild(layout, tensors) is value
