"""Nested values: taking them apart and putting them together are inverse to each other."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poptorch.errors import Error
from poptorch.structure import (
    CUSTOM_TYPES,
    Constant,
    ICustomArgParser,
    Leaf,
    Node,
    builder,
    flatten,
    flatten_like,
    hidden_tensors,
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
    structure, tensors = flatten(value)
    assert same(rebuild(structure, tensors), value)
    assert same(builder(structure)(tensors), value)


def test_builder_takes_tensors_in_any_order_and_more_than_once():
    build = builder(Node(tuple, ("0", "1", "2"), (Leaf(1), Leaf(0), Leaf(1))))
    assert build(["a", "b"]) == ("b", "a", "b")


@given(nested)
def test_flatten_like_its_own_structure_gives_the_same_tensors(value):
    structure, tensors = flatten(value)
    again = flatten_like(structure, value)
    assert len(again) == len(tensors)
    assert all(a is b for a, b in zip(again, tensors, strict=True))


@given(nested)
def test_every_tensor_has_a_name_and_names_differ(value):
    structure, tensors = flatten(value)
    names = leaf_names(structure, "x")
    assert len(names) == len(tensors)
    assert len(set(names)) == len(names)


@given(nested)
def test_mapping_leaves_to_themselves_changes_nothing(value):
    structure, tensors = flatten(value)
    assert same(rebuild(map_leaves(structure, Leaf), tensors), value)


@given(st.dictionaries(keys, st.integers(0, 9), min_size=2, max_size=4))
def test_dictionaries_are_read_in_the_order_of_the_structure(numbers):
    value = {key: torch.tensor([float(number)]) for key, number in numbers.items()}
    structure, tensors = flatten(value)
    shuffled = dict(reversed(list(value.items())))
    assert all(a is b for a, b in zip(flatten_like(structure, shuffled), tensors, strict=True))


def test_tensors_come_depth_first():
    a, b, c = (torch.tensor([float(n)]) for n in range(3))
    structure, tensors = flatten([a, ({"k": b}, 7), c])
    assert [t.item() for t in tensors] == [0, 1, 2]
    assert leaf_names(structure, "x") == ["x[0]", "x[1][0][k]", "x[2]"]


def test_a_tensor_may_appear_twice():
    a = torch.ones(1)
    structure, tensors = flatten((a, a))
    assert len(tensors) == 2
    assert same(rebuild(structure, tensors), (a, a))


@pytest.mark.parametrize("items", [{"a": torch.ones(1)}, {}, {3: torch.ones(1)}], ids=["text", "nothing", "number"])
def test_defaultdict_keeps_its_factory(items):
    structure, tensors = flatten(defaultdict(list, items))
    rebuilt = rebuild(structure, tensors)
    assert type(rebuilt) is defaultdict
    assert same(dict(rebuilt), items)
    assert rebuilt["more"] == []


def test_dictionaries_with_other_factories_are_alike():
    assert flatten(defaultdict(lambda: 1, a=torch.ones(1)))[0] == flatten(defaultdict(lambda: 1, a=torch.ones(1)))[0]


class Named(dict):
    def __init__(self, name, **items):
        super().__init__(**items)
        self.name = name


def test_dictionary_whose_constructor_takes_something_else_keeps_its_items():
    structure, tensors = flatten(Named("n", a=torch.ones(1)))
    rebuilt = rebuild(structure, tensors)
    assert type(rebuilt) is Named
    assert rebuilt["a"] is tensors[0]


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
    structure, tensors = flatten({"g": value})
    again = rebuild(structure, tensors)["g"]
    assert again is not value
    assert again.nodes is value.nodes
    assert again.edges is value.edges


def test_parser_of_a_base_class_serves_its_subclasses(graphs):
    class Tree(Graph):
        pass

    _, tensors = flatten(Tree(torch.zeros(1), torch.ones(1)))
    assert len(tensors) == 2


def test_a_parser_that_is_gone_is_missed_by_name(graphs):
    structure, tensors = flatten(Graph(torch.zeros(2), torch.ones(1)))
    CUSTOM_TYPES.register(Graph, None)
    for use in (lambda: rebuild(structure, tensors), lambda: flatten_like(structure, Graph(*tensors))):
        with pytest.raises(Error, match=r"no parser for Graph any more(.|\n)*registerCustomArgParser"):
            use()


def test_without_a_parser_an_object_is_a_constant():
    value = Graph(torch.zeros(1), torch.ones(1))
    structure, tensors = flatten(value)
    assert tensors == []
    assert rebuild(structure, tensors) is value


@dataclass(frozen=True)
class Record:
    first: Any
    second: Any = 7


@dataclass
class Slotted:
    __slots__ = ("tensor",)
    tensor: torch.Tensor


class Checked:
    """A dataclass that counts how often it was made, and remembers something beside its fields."""

    made = 0


@dataclass
class Counting(Checked):
    tensor: torch.Tensor

    def __post_init__(self):
        Checked.made += 1
        self.extra = self.tensor + 1


def test_a_dataclass_with_tensors_is_a_container():
    value = Record({"a": torch.ones(2)}, [torch.zeros(1), "text"])
    structure, tensors = flatten(value)
    assert leaf_names(structure, "pair") == ["pair.first[a]", "pair.second[0]"]
    back = rebuild(structure, [tensor + 1 for tensor in tensors])
    assert back == Record({"a": back.first["a"]}, [back.second[0], "text"])
    assert back.first["a"].tolist() == [2, 2]
    assert flatten_like(structure, value) == tensors


def test_a_dataclass_without_tensors_is_a_constant():
    value = Record(1, "two")
    assert flatten(value) == (Constant(value), [])


def test_a_dataclass_is_rebuilt_without_its_constructor():
    structure, tensors = flatten(Counting(torch.zeros(1)))
    made = Checked.made
    back = rebuild(structure, [tensor + 5 for tensor in tensors])
    assert (Checked.made, float(back.tensor), float(back.extra)) == (made, 5, 6)


def test_a_dataclass_with_slots_is_a_container():
    structure, tensors = flatten(Slotted(torch.ones(1)))
    assert float(rebuild(structure, [tensors[0] * 3]).tensor) == 3


def test_a_dataclass_that_holds_itself_has_an_end():
    value = Record.__new__(Record)
    object.__setattr__(value, "first", torch.ones(1))
    object.__setattr__(value, "second", value)
    structure, tensors = flatten(value)
    assert len(tensors) == 1
    assert rebuild(structure, tensors).second is value


def test_any_mapping_is_a_container():
    structure, tensors = flatten(UserDict(a=torch.ones(1)))
    assert rebuild(structure, tensors) == UserDict(a=tensors[0])


@pytest.mark.parametrize(
    "value",
    [
        {torch.ones(1)},
        deque([torch.ones(1)]),
        {"a": torch.ones(1)}.values(),
        {"a": torch.ones(1)}.items(),
        partial(max, torch.ones(1)),
        partial(max, key=torch.ones(1)),
        SimpleNamespace(inner=SimpleNamespace(tensor=torch.ones(1))),
    ],
    ids=["set", "deque", "values", "items", "argument", "keyword", "object"],
)
def test_tensors_in_other_types_are_found(value):
    assert [float(tensor) for tensor in hidden_tensors(value)] == [1]


def test_modules_and_plain_values_hide_no_tensors():
    assert not list(hidden_tensors([torch.nn.Linear(1, 1), "text", 3, torch.Tensor, print]))
