"""Moments, latencies and cycles of the last call."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from poptorch.enums import OutputMode
from poptorch.runtime import latency

LATENCIES = ("getLatency", "getHostIpuLatency", "getComputeLatency", "getIpuHostLatency")


class Adder(nn.Module):
    def forward(self, x, y):
        return x + y


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, y):
        return F.mse_loss(self.layer(x), y)


def options() -> poptorch.Options:
    return poptorch.Options().engine("eager")


@pytest.mark.parametrize("iterations", [1, 10])
def test_one_moment_per_micro_batch_and_tensor(iterations):
    model = poptorch.inferenceModel(Adder(), options().deviceIterations(iterations))
    assert model.getPerfCounters() == {n: [[]] for n in ("input", "input_complete", "output", "output_complete")}
    model(torch.ones(iterations), torch.ones(iterations))
    counters = model.getPerfCounters()
    assert {name: [len(moments) for moments in lists] for name, lists in counters.items()} == {
        "input": [iterations, iterations],
        "input_complete": [iterations, iterations],
        "output": [iterations],
        "output_complete": [iterations],
    }
    for lists in counters.values():
        assert all(moments == sorted(moments) for moments in lists)
    assert counters["input"][0][0] <= counters["input_complete"][0][0] <= counters["output"][0][0]


@pytest.mark.parametrize(
    ("mode", "period", "expected"),
    [(OutputMode.All, None, 24), (OutputMode.Final, None, 2), (OutputMode.Sum, None, 2), (OutputMode.EveryN, 2, 12)],
)
def test_outputs_are_counted_as_they_are_returned(mode, period, expected):
    chosen = options().deviceIterations(4).replicationFactor(2).outputMode(mode, period)
    chosen.Training.gradientAccumulation(3)
    module = Trained()
    model = poptorch.trainingModel(module, chosen, torch.optim.SGD(module.parameters(), lr=0.1))
    model(torch.ones(24, 3), torch.ones(24, 2))
    counters = model.getPerfCounters()
    assert [len(moments) for moments in counters["input"]] == [24, 24]
    assert [len(moments) for moments in counters["output"]] == [expected]


def test_latencies_are_ordered_and_add_up():
    model = poptorch.inferenceModel(Adder(), options().deviceIterations(5))
    assert all(getattr(model, name)() == (0.0, 0.0, 0.0) for name in LATENCIES)
    model(torch.ones(5), torch.ones(5))
    for name in LATENCIES:
        low, high, average = getattr(model, name)()
        assert 0 <= low <= average <= high
    assert model.getLatency()[1] >= model.getComputeLatency()[1]


def test_synthetic_data_transfers_nothing():
    model = poptorch.inferenceModel(Adder(), options().enableSyntheticData(True))
    model(torch.ones(1), torch.ones(1))
    assert model.getLatency() == (0.0, 0.0, 0.0)
    assert model.getPerfCounters()["input"] == [[], []]


def test_more_starts_than_ends_form_groups():
    assert latency([0.0, 1.0, 2.0, 3.0], [2.5, 5.5]) == (2.5, 3.5, 3.0)


def test_cycle_count(caplog):
    model = poptorch.inferenceModel(Adder(), options())
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        model.cycleCount()
    model = poptorch.inferenceModel(Adder(), options().logCycleCount(True))
    with pytest.raises(poptorch.Error, match="Please run the model at least once"):
        model.cycleCount()
    model.compile(torch.ones(1), torch.ones(1))
    with pytest.raises(poptorch.Error, match="Please run the model at least once"):
        model.cycleCount()
    with caplog.at_level("INFO", "poptorch::python"):
        model(torch.ones(1), torch.ones(1))
    assert f"Total number of IPU cycles: {model.cycleCount()}" in caplog.text
    assert model.cycleCount() > 0


def test_ipu_model_counts_no_cycles():
    model = poptorch.inferenceModel(Adder(), options().logCycleCount(True).useIpuModel(True))
    with pytest.raises(poptorch.Error, match="Cycle count logging is only supported on actual IPU hardware"):
        model(torch.ones(1), torch.ones(1))
