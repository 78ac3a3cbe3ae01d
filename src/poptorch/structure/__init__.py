"""Nested arguments and results as flat tensors and a `Structure`; types of the user that take part."""

from poptorch.structure.custom import CUSTOM_TYPES, ICustomArgParser, registerCustomArgParser
from poptorch.structure.data import structure_data, structure_from, unknown_types, value_data, value_from
from poptorch.structure.hidden import hidden_tensors
from poptorch.structure.nested import (
    Constant,
    Custom,
    Leaf,
    Node,
    Structure,
    builder,
    child_name,
    constants,
    flatten,
    flatten_like,
    leaf_names,
    map_leaves,
    rebuild,
)

__all__ = [
    "CUSTOM_TYPES",
    "Constant",
    "Custom",
    "ICustomArgParser",
    "Leaf",
    "Node",
    "Structure",
    "builder",
    "child_name",
    "constants",
    "flatten",
    "flatten_like",
    "hidden_tensors",
    "leaf_names",
    "map_leaves",
    "rebuild",
    "registerCustomArgParser",
    "structure_data",
    "structure_from",
    "unknown_types",
    "value_data",
    "value_from",
]
