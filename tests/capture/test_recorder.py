"""What a recorded graph holds: one node per op, and what is known about it."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import poptorch
from models import Regression
from poptorch.capture.recorder import Recorder


def record(function, *inputs):
    """The recorder of a function that was run without values."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        recorder = Recorder(fake)
        recorder.record(function, [fake.from_tensor(tensor) for tensor in inputs])
    return recorder


def called(recorder):
    return [node.name for node in recorder.graph.nodes if node.op == "call_function"]


def run(recorder, *inputs):
    """What the recorded graph computes."""
    root = nn.Module()
    for node, tensor in recorder.constants.items():
        root.register_buffer(node.target, tensor)
    return fx.GraphModule(root, recorder.graph)(*inputs)


def test_a_graph_computes_what_its_function_does():
    def function(x, y):
        low, high = torch.split(x @ y, 2)
        return [high * 2, low.sum()]

    x, y = torch.randn(4, 3), torch.randn(3, 3)
    recorder = record(function, x, y)
    torch.testing.assert_close(run(recorder, x, y), function(x, y))
    assert recorder.constants == {}


def test_every_node_knows_the_shape_and_type_of_its_value():
    recorder = record(lambda x: [x.t().half(), torch.topk(x, 1)[1]], torch.randn(4, 3))
    found = {node.name: node.meta["val"] for node in recorder.graph.nodes if node.op != "output"}
    assert found["in0"].shape == (4, 3)
    assert (found["t"].shape, found["t"].stride()) == ((3, 4), (1, 3))
    assert found["_to_copy"].dtype == torch.float16
    assert [value.dtype for value in found["topk"]] == [torch.float32, torch.int64]
    assert found["getitem_1"].shape == (4, 1)


def test_a_tensor_from_outside_is_one_constant_however_often_it_is_used():
    outside = torch.randn(3)
    recorder = record(lambda x: [x + outside, x * outside], torch.zeros(3))
    (constant,) = recorder.constants.values()
    assert constant is outside
    torch.testing.assert_close(run(recorder, torch.ones(3)), [1 + outside, outside])


def test_a_tensor_made_on_the_way_is_not_changed_by_what_follows():
    recorder = record(lambda x: [x * torch.tensor([1.0, 2.0])], torch.zeros(2))
    assert called(recorder) == ["lift_fresh_copy", "mul"]


def test_a_value_that_depends_on_constants_only_can_be_read():
    def function(x):
        return [x * (torch.tensor([2.0, 3.0]).prod() + torch.arange(3).sum()).item()]

    torch.testing.assert_close(run(record(function, torch.ones(2)), torch.ones(2)), [torch.full((2,), 9.0)])


def test_marks_of_the_profiler_are_not_part_of_the_program():
    def function(x):
        with torch.autograd.profiler.record_function("a stretch of time"):
            return [x + 1]

    assert called(record(function, torch.ones(2))) == ["add"]


def test_a_tensor_without_a_value_cannot_be_a_constant():
    with FakeTensorMode():
        other = torch.ones(2)
    with pytest.raises(RuntimeError, match="without a value"):
        record(lambda x: [x + other], torch.ones(2))


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_submodule_that_torch_compiles_is_captured_like_any_other():
    model = Regression()
    x, target = torch.randn(2, 3), torch.randn(2, 2)
    expected = model(x, target)
    model.fc.compile(backend="eager")
    inference = poptorch.inferenceModel(model, poptorch.Options().engine("eager"))
    torch.testing.assert_close(inference(x, target), expected)
