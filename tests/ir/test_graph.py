"""StepGraph: what it prints, and what `verify` refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from poptorch.ir import Guard, InputSpec, OutputRole, OutputSpec, Role, Signature, SourceLine, StepGraph, verify

aten = torch.ops.aten


def small_graph() -> StepGraph:
    """y = w * x, and w gets a new value."""
    graph = fx.Graph()
    weight, x = graph.placeholder("w"), graph.placeholder("x")
    product = graph.call_function(aten.mul.Tensor, (weight, x))
    total = graph.call_function(aten.add.Tensor, (weight, 1.0))
    graph.output((product, total))
    with FakeTensorMode():
        for node in (weight, x, product, total):
            node.meta["val"] = torch.empty(2, 3)
    signature = Signature(
        inputs=(
            InputSpec("w", Role.PARAMETER, (2, 3), torch.float32, (3, 1)),
            InputSpec("x", Role.USER_INPUT, (2, 3), torch.float32, (3, 1)),
        ),
        outputs=(OutputSpec("output0", OutputRole.USER_OUTPUT), OutputSpec("w", OutputRole.NEW_VALUE)),
    )
    return StepGraph("step", graph, signature)


def with_inputs(graph: StepGraph, *inputs: InputSpec) -> StepGraph:
    return replace(graph, signature=replace(graph.signature, inputs=inputs))


def test_prints_as_a_typed_program():
    assert str(small_graph()).splitlines() == [
        "step(w: f32[2,3] parameter, x: f32[2,3] input):",
        "  %0: f32[2,3] = aten.mul.Tensor(w, x)",
        "  %1: f32[2,3] = aten.add.Tensor(w, 1.0)",
        "  return %0 as output0 output",
        "  return %1 as w new value",
    ]


def test_printing_twice_gives_the_same_text():
    graph = small_graph()
    assert str(graph) == str(graph) == str(small_graph())


def test_copied_ops_can_be_edited_without_changing_the_graph():
    graph = small_graph()
    before = str(graph)
    ops = graph.copy_ops()
    ops.output_node().args = ((),)
    ops.eliminate_dead_code()
    assert str(graph) == before


def test_counts_ops_and_not_inputs():
    assert small_graph().count_ops() == 2


def test_verify_accepts_a_good_graph():
    verify(small_graph())


def test_verify_wants_one_placeholder_per_input():
    graph = small_graph()
    with pytest.raises(AssertionError, match="2 placeholders, 1 inputs"):
        verify(with_inputs(graph, graph.signature.inputs[0]))


def test_verify_wants_one_result_per_output():
    graph = small_graph()
    signature = replace(graph.signature, outputs=graph.signature.outputs[:1])
    with pytest.raises(AssertionError, match="2 results, 1 outputs"):
        verify(replace(graph, signature=signature))


def test_verify_wants_unique_names():
    graph = small_graph()
    weight, x = graph.signature.inputs
    with pytest.raises(AssertionError, match="not unique"):
        verify(with_inputs(graph, weight, replace(x, name="w")))


def test_verify_wants_state_before_user_inputs():
    graph = small_graph()
    weight, x = graph.signature.inputs
    with pytest.raises(AssertionError, match="state comes first"):
        verify(with_inputs(graph, replace(weight, role=Role.USER_INPUT), replace(x, role=Role.BUFFER)))


def test_verify_wants_new_values_to_belong_to_an_input():
    graph = small_graph()
    signature = replace(graph.signature, outputs=(graph.signature.outputs[0], OutputSpec("v", OutputRole.NEW_VALUE)))
    with pytest.raises(AssertionError, match="does not exist"):
        verify(replace(graph, signature=signature))


@pytest.mark.parametrize("change", [{"shape": (3, 2)}, {"dtype": torch.float16}])
def test_verify_compares_declared_and_real_types(change):
    graph = small_graph()
    weight, x = graph.signature.inputs
    with pytest.raises(AssertionError, match="is declared"):
        verify(with_inputs(graph, replace(weight, **change), x))


def test_verify_wants_an_output_for_guards():
    guard = Guard(SourceLine("model.py", 3, "forward"), "the value True")
    with pytest.raises(AssertionError, match="one guard output"):
        verify(replace(small_graph(), guards=(guard,)))


def test_verify_lints_the_ops():
    graph = small_graph()
    ops = graph.copy_ops()
    first, second = [node for node in ops.nodes if node.op == "call_function"]
    first.args = (second, second)  # used before it is computed
    with pytest.raises(RuntimeError, match="before"):
        verify(replace(graph, ops=ops))
