"""Nodes that run other graphs: how they print, what is verified, what they compute, and that they survive as data."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import nn

import poptorch
from poptorch.capture import Call
from poptorch.capture.trace import trace_step
from poptorch.ir import (
    Direction,
    GraphBuilder,
    InputSpec,
    Note,
    OutputRole,
    OutputSpec,
    Role,
    choose_graph,
    repeat_graph,
    repeat_while,
    verify,
)
from poptorch.ir.control import called_graphs
from poptorch.ir.digest import graph_digest
from poptorch.ir.names import tensor_names
from poptorch.ir.python import as_function
from poptorch.ir.serial import graph_data, graph_from, origin_data
from poptorch.options import resolve
from poptorch.structure import flatten


class Looping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        def branch(x):
            return poptorch.cond(x.sum() > 0, lambda x: x + 1, [x], lambda: x * 2, [])

        (x,) = poptorch.for_loop(1000, lambda x: torch.tanh(self.linear(x)), [x])
        return torch.while_loop(lambda x: x.sum() < 9, lambda x: tuple(branch(x)), (x,))


def captured():
    arguments, tensors = flatten((torch.ones(1, 2),))
    call = Call(arguments, flatten({})[0], ("x",), tuple(tensors))
    return trace_step(Looping(), call, resolve(poptorch.Options(), training=False)).graph


def test_loops_and_branches_print_with_their_bodies(golden):
    golden.check(str(captured()), "printed_control_flow")


def test_a_thousand_iterations_are_one_body():
    assert captured().graphs["loop0"].count_ops() == 3


def test_a_graph_with_bodies_survives_as_data():
    graph = captured()
    again = graph_from(graph_data(graph), origin_data(graph), graph.constants)
    verify(again)
    assert again == graph
    assert str(again) == str(graph)
    assert graph_digest(again) == graph_digest(graph)


def test_the_digest_knows_the_bodies():
    graph = captured()
    (loop, body), *others = graph.graphs.items()
    ops = body.copy_ops()
    next(node for node in ops.nodes if node.target is torch.ops.aten.tanh.default).target = torch.ops.aten.sin.default
    changed = replace(graph, graphs={loop: replace(body, ops=ops), **dict(others)})
    assert graph_digest(changed) != graph_digest(graph)
    assert changed != graph


def test_results_of_loops_and_branches_have_names():
    assert {"Loop:0", "Loop__1:0"} <= tensor_names(captured()).values.keys()


NOTE = Note(Direction.FORWARD)
aten = torch.ops.aten


def vector(name, dtype=torch.float32, shape=(2,)):
    return InputSpec(name, Role.USER_INPUT, shape, dtype, (1,) * len(shape))


def body(name, op, *args, takes=1, dtype=torch.float32):
    """A graph that applies an op to its first input."""
    builder = GraphBuilder()
    inputs = [builder.input(vector(f"input{index}", dtype)) for index in range(takes)]
    given = [inputs[arg] if isinstance(arg, int) else arg for arg in args]
    builder.output(OutputSpec("result0", OutputRole.USER_OUTPUT), builder.call(NOTE, op, inputs[0], *given))
    return builder.build(name)


def around(target, arguments, *graphs, condition=(), **named):
    """A graph with two vectors and a condition, that runs others; `arguments` gets their nodes."""
    builder = GraphBuilder()
    x, y = (builder.input(vector(name)) for name in "xy")
    flag = builder.input(vector("flag", torch.bool, condition))
    value = (graphs[-1].results[0].meta["val"],)
    node = builder.call_as(NOTE, value, target, *arguments(x, y, flag), **named)
    item = builder.call(NOTE, torch.ops.aten.add.Tensor, _first(builder, node), 0)
    builder.output(OutputSpec("output0", OutputRole.USER_OUTPUT), item)
    return builder.build("step", graphs={graph.name: graph for graph in graphs})


def _first(builder, node):
    return builder.call(NOTE, operator.getitem, node, 0)


DOUBLE = body("double", aten.mul.Tensor, 1, takes=2)
NEGATE = body("negate", aten.neg.default)


def small(limit):
    """Whether the sum of a vector is below a limit."""
    builder = GraphBuilder()
    first = builder.input(vector("input0"))
    builder.input(vector("input1"))
    total = builder.call(NOTE, aten.sum.default, first)
    builder.output(OutputSpec("result0", OutputRole.USER_OUTPUT), builder.call(NOTE, aten.lt.Scalar, total, limit))
    return builder.build("small")


REPEAT = around(repeat_graph, lambda x, y, flag: ("double", 3, [x], [y]), DOUBLE)
CHOOSE = around(choose_graph, lambda x, y, flag: (flag, "double", [x, y], "negate", [y]), DOUBLE, NEGATE)
WHILE = around(repeat_while, lambda x, y, flag: ("small", "double", [x], [y]), small(50.0), DOUBLE)


def test_what_such_nodes_compute():
    x, y, yes, no = torch.ones(2), torch.full((2,), 2.0), torch.tensor(True), torch.tensor(False)
    for graph, flag, expected in (
        (REPEAT, yes, [8.0, 8.0]),
        (CHOOSE, yes, [2.0, 2.0]),
        (CHOOSE, no, [-2.0, -2.0]),
        (WHILE, yes, [32.0, 32.0]),
    ):
        verify(graph)
        assert as_function(graph.ops, "step", graph.graphs)(x, y, flag)[0].tolist() == expected


def test_a_loop_that_never_runs_gives_copies():
    graph = WHILE
    x = torch.full((2,), 100.0)
    (result,) = as_function(graph.ops, "step", graph.graphs)(x, x, torch.tensor(True))
    assert torch.equal(result, x)


def test_the_graphs_that_ops_run():
    assert called_graphs(CHOOSE.ops) == {"double", "negate"}
    assert called_graphs(WHILE.ops) == {"small", "double"}


LONG = body("long", aten.repeat.default, [2])
DRAWING = body("drawing", aten.rand_like.default)


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (around(repeat_graph, lambda x, y, flag: ("long", 3, [x], []), LONG), "does not give what it takes"),
        (around(choose_graph, lambda x, y, flag: (flag, "long", [x], "negate", [x]), LONG, NEGATE), "different types"),
        (
            around(choose_graph, lambda x, y, flag: (flag, "negate", [x], "negate", [x]), NEGATE, condition=(1,)),
            "one truth value",
        ),
        (around(repeat_graph, lambda x, y, flag: ("drawing", 3, [x], []), DRAWING), "a wrong note on draws"),
        (around(repeat_graph, lambda x, y, flag: ("double", 3, [x], []), DOUBLE), "takes 2 tensors, not 1"),
        (replace(REPEAT, graphs={}), "does not exist"),
    ],
)
def test_nodes_that_are_refused(graph, text):
    with pytest.raises(AssertionError, match=text):
        verify(graph)


def test_a_loop_that_draws_is_random():
    drawing = around(repeat_graph, lambda x, y, flag: ("drawing", 3, [x], []), DRAWING, draws=True)
    verify(drawing)
    assert drawing.draws_random_numbers
    assert not REPEAT.draws_random_numbers
