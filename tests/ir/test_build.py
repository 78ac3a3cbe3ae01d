"""The builder of graphs: whatever the order in which parts are added, what comes out keeps the rules."""

from __future__ import annotations

import torch

from poptorch.ir import (
    Direction,
    GraphBuilder,
    InputSpec,
    Note,
    OutputRole,
    OutputSpec,
    Role,
    SourceLine,
    StepGraph,
    note_of,
    value_of,
    verify,
)

aten = torch.ops.aten
NOTE = Note(Direction.FORWARD, SourceLine("model.py", 3, "forward"), "layer")


def spec(name: str, role: Role, *shape: int, dtype: torch.dtype = torch.float32) -> InputSpec:
    return InputSpec.of(name, role, torch.empty(shape, dtype=dtype))


def scaled() -> StepGraph:
    """x * w + c, with the user's input added first."""
    builder = GraphBuilder()
    x = builder.input(spec("x", Role.USER_INPUT, 2, 3))
    w = builder.input(spec("w", Role.PARAMETER, 3))
    product = builder.call(NOTE, aten.mul.Tensor, x, w)
    c = builder.input(spec("c", Role.CONSTANT, 3))
    builder.call(NOTE, aten.neg.default, product)  # nobody needs it
    builder.output(OutputSpec("output0", OutputRole.USER_OUTPUT), builder.call(NOTE, aten.add.Tensor, product, c))
    return builder.build("step", constants={"c": torch.ones(3), "other": torch.zeros(1)})


def test_state_comes_first_and_dead_ops_go():
    graph = scaled()
    verify(graph)
    assert str(graph).splitlines() == [
        "step(w: f32[3] parameter, c: f32[3] constant, x: f32[2,3] input):",
        "  %0: f32[2,3] = aten.mul.Tensor(x, w)   forward   model.py:3",
        "  %1: f32[2,3] = aten.add.Tensor(%0, c)  forward   model.py:3",
        "  return %1 as output0 output",
    ]


def test_inputs_and_outputs_are_pairs_of_spec_and_node():
    graph = scaled()
    assert [(spec.name, node) for spec, node in graph.inputs] == list(
        zip(["w", "c", "x"], graph.placeholders, strict=True)
    )
    assert [(spec.name, node) for spec, node in graph.outputs] == [("output0", graph.results[0])]


def test_only_constants_that_are_inputs_go_with_the_graph():
    assert list(scaled().constants) == ["c"]


def test_new_ops_have_a_note_and_a_value():
    (op, *_) = [node for node in scaled().ops.nodes if node.op == "call_function"]
    assert note_of(op) == NOTE
    assert (value_of(op).shape, value_of(op).dtype) == ((2, 3), torch.float32)


def test_copied_ops_use_what_stands_for_their_operands():
    source = scaled()
    builder = GraphBuilder()
    for own, node in source.inputs:
        builder.input(own if own.name != "w" else spec("v", Role.BUFFER, 3), node)
    builder.copy(source.ops.nodes)
    for own, node in source.outputs:
        builder.output(own, builder.copies[node])
    expected = str(source).replace("step(w: f32[3] parameter", "copy(v: f32[3] buffer").replace("(x, w)", "(x, v)")
    assert str(builder.build("copy", constants=source.constants)) == expected


def test_a_cast_to_the_type_that_a_value_has_is_no_op():
    builder = GraphBuilder()
    x = builder.input(spec("x", Role.USER_INPUT, 2))
    assert builder.cast(NOTE, x, torch.float32) is x
    assert value_of(builder.cast(NOTE, x, torch.float16)).dtype is torch.float16


def test_whose_an_input_is_does_not_depend_on_its_name():
    grouped = InputSpec("group0", Role.PARAMETER, (2,), torch.float32, (1,))
    hyper = InputSpec("group0:lr", Role.HYPER, (), torch.float64, (), key="lr", group=0)
    assert (grouped.owner, grouped.group) == ("group0", None)
    assert (hyper.owner, hyper.group, hyper.key) == ("", 0, "lr")
