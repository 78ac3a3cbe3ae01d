"""Overlapped inputs and outputs: what is checked when a model is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from models import Apply
from poptorch import OverlapMode
from poptorch.ir import hint_of

LOOP = OverlapMode.OverlapDeviceIterationLoop


def sharded(tiles=32):
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    if tiles:
        options.TensorLocations.numIOTiles(tiles)
    return options


def infer(function, *args, options=None):
    model = poptorch.inferenceModel(Apply(function), sharded() if options is None else options)
    return model(*args), model


def mark_input(x):
    return poptorch.set_overlap_for_input(x, LOOP)


def mark_output(x):
    return poptorch.set_overlap_for_output(x, LOOP)


X = torch.ones(2, 2)


def refuses(function, message, options=None):
    with pytest.raises(poptorch.Error, match=message) as error:
        infer(function, X, options=options)
    assert "test_overlap.py" in str(error.value)
    assert "fix:" in str(error.value)


def test_only_inputs_can_be_overlapped_inputs():
    refuses(lambda x: mark_input(x + 1) * 2, "set_overlap_for_input was applied on a node which is not a tensor input")


def test_only_outputs_can_be_overlapped_outputs():
    refuses(lambda x: mark_output(x * 2).sum(), "set_overlap_for_output .* which is not a tensor output")


def test_an_overlapped_input_is_not_used_itself():
    refuses(lambda x: mark_input(x) + x, "set_overlap_for_input must be the only op applied to an input")
    refuses(lambda x: (mark_input(x) * 2, x), "must be the only op applied to an input")


def test_an_output_is_not_returned_raw_and_overlapped():
    def forward(x):
        y = x * 2
        return y, mark_output(y)

    refuses(forward, "set_overlap_for_output .* returned twice")


def test_an_overlapped_output_is_not_returned_twice():
    def forward(x):
        y = mark_output(x * 2)
        return y, [y]

    refuses(forward, "returned twice")


def test_the_default_strategy_does_not_overlap():
    message = "Overlapped IO is not supported with poptorch.PipelinedExecution."
    refuses(lambda x: mark_input(x) * 2, message, poptorch.Options())
    refuses(lambda x: mark_output(x * 2), message, poptorch.Options())


def test_overlap_needs_tiles_for_transfers():
    refuses(lambda x: mark_input(x) * 2, "No IO tiles allocated: .*at least 32", sharded(tiles=0))


def test_overlapped_outputs_are_all_returned_or_summed():
    options = sharded().outputMode(poptorch.OutputMode.Final)
    refuses(lambda x: mark_output(x * 2), "Unsupported output mode for overlapped IO.", options)
    infer(lambda x: mark_output(x * 2), X, options=sharded().outputMode(poptorch.OutputMode.Sum))


def test_with_tiles_for_transfers_it_runs():
    result, model = infer(lambda x: mark_output(mark_input(x) * 2), X)
    assert torch.equal(result, X * 2)
    (product,) = [node for node in model._executable.step.graph.ops.nodes if node.op == "call_function"]
    assert hint_of(product, "overlap_input") == hint_of(product, "overlap_output") == LOOP.value


def test_no_overlap_needs_nothing():
    def forward(x):
        x = poptorch.set_overlap_for_input(x, OverlapMode.NoOverlap)
        return poptorch.set_overlap_for_output(x * 2, OverlapMode.NoOverlap)

    assert torch.equal(infer(forward, X, options=poptorch.Options())[0], X * 2)


def test_an_overlapped_output_may_be_computed_with():
    def forward(x):
        y = x * 2
        marked = mark_output(y)
        return marked, marked + 1, y - 1

    result, _ = infer(forward, X)
    assert [value[0, 0].item() for value in result] == [2, 3, 1]


def test_types_that_are_narrowed_are_still_inputs_and_outputs():
    result, _ = infer(lambda x: mark_output(mark_input(x) * 2), X.double())
    assert torch.equal(result, X * 2)
    counts, _ = infer(lambda x: mark_output(mark_input(x) * 2), torch.tensor([1, 2]))
    assert counts.tolist() == [2, 4]


def test_structures_are_kept():
    def forward(x, y, z):
        first, (second, third) = poptorch.set_overlap_for_input([x, (y, {"z": z, "n": 3})], LOOP)
        assert third["n"] == 3
        return poptorch.set_overlap_for_output({"sum": (first + second, [third["z"] * 1])}, LOOP)

    result, _ = infer(forward, X, X, X)
    assert list(result) == ["sum"]
    assert isinstance(result["sum"], tuple)
    assert isinstance(result["sum"][1], list)
    assert torch.equal(result["sum"][0], X + X)


def test_an_overlapped_input_in_training():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x):
            return poptorch.identity_loss(self.fc(mark_input(x)), "sum")

    module = Model()
    options = sharded().outputMode(poptorch.OutputMode.All)
    training = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))
    expected = module.fc(X).sum().item()
    assert training(X).item() == pytest.approx(expected)


def test_on_the_host_nothing_happens():
    assert mark_input(X) is X
    assert mark_output(X) is X
    with pytest.raises(AssertionError, match=r"poptorch.OverlapMode, not 'all'"):
        poptorch.set_overlap_for_input(X, "all")
