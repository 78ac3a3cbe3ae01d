"""Functions whose ops are put into graphs: what was traced once is used again where it is the same."""

from __future__ import annotations

import pytest
import torch

from poptorch.ir import Direction, GraphBuilder, InputSpec, Note, OutputRole, OutputSpec, Role, StepGraph
from poptorch.ir.python import as_function

NOTE = Note(Direction.FORWARD)


class Scaling:
    """A function that counts how often it is traced; its result is nested."""

    def __init__(self) -> None:
        self.traces = 0

    def __call__(self, x, factor, others):
        self.traces += 1
        return {"scaled": x * factor, "sum": sum(others, x.sum())}


def scaled(function, *calls) -> StepGraph:
    """What a function computes of each of these tensors and numbers, beside the tensor itself."""
    builder = GraphBuilder()
    for index, (tensor, factor) in enumerate(calls):
        x = builder.input(InputSpec.of(f"x{index}", Role.USER_INPUT, tensor))
        found = builder.inline(NOTE, function, x, factor, [x, x])
        for name, node in found.items():
            builder.output(OutputSpec(f"{name}{index}", OutputRole.USER_OUTPUT), node)
    return builder.build("step")


def test_a_function_is_traced_once_for_each_kind_of_argument():
    function, square, wide = Scaling(), torch.randn(3, 3), torch.randn(3, 4)
    calls = [(square, 2.0), (square + 1, 2.0), (wide, 2.0), (square, 3.0), (square.T, 2.0), (square.double(), 2.0)]
    graph = scaled(function, *calls)
    assert function.traces == 5
    found = as_function(graph.ops, "step")(*(tensor for tensor, _ in calls))
    expected = [value for tensor, factor in calls for value in Scaling()(tensor, factor, [tensor, tensor]).values()]
    torch.testing.assert_close(list(found), expected)


def difference(a, b):
    return a - b * 2


def differences(*pairs) -> StepGraph:
    """`a - 2 b` of pairs of inputs with these numbers, all of one kind."""
    builder = GraphBuilder()
    inputs = [builder.input(InputSpec.of(f"x{i}", Role.USER_INPUT, torch.empty(3))) for i in range(2)]
    for index, (a, b) in enumerate(pairs):
        found = builder.inline(NOTE, difference, inputs[a], inputs[b])
        builder.output(OutputSpec(f"result{index}", OutputRole.USER_OUTPUT), found)
    return builder.build("step")


@pytest.mark.parametrize("pairs", [[(0, 0), (0, 1)], [(0, 1), (1, 0), (1, 1)]])
def test_what_was_traced_for_one_value_twice_serves_for_two_values(pairs):
    graph, values = differences(*pairs), (torch.randn(3), torch.randn(3))
    found = as_function(graph.ops, "step")(*values)
    torch.testing.assert_close(list(found), [difference(values[a], values[b]) for a, b in pairs])
