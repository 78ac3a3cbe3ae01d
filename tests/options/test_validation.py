"""What is checked when a model compiles, and what is logged about it."""

from __future__ import annotations

import logging

import pytest
import torch

import poptorch
from poptorch import OutputMode
from poptorch.options import popart_keys, validate


def options():
    return poptorch.Options().outputMode(OutputMode.All)


def test_options_that_were_set_by_methods_pass(tmp_path):
    chained = (
        options()
        .deviceIterations(1)
        .setExecutionStrategy(poptorch.PipelinedExecution())
        .replicationFactor(1)
        .logDir(str(tmp_path))
        .enableSyntheticData(True)
        .maxRepeatLogs(None)
    )
    validate(chained.toDict())


FULL = {
    "hardwareInstrumentations": {0, 1},
    "dotChecks": ["FINAL", "ALL"],
    "engineOptions": {"debug.allowOutOfMemory": "true"},
    "reportOptions": {"reportOptA": "A"},
    "convolutionOptions": {"convA": "A"},
    "matmulOptions": {"matA": "A"},
    "lstmOptions": {"lstmA": "A"},
    "gclOptions": {"gclA": "A"},
    "customCodelets": [],
    "autoRecomputation": 1,
    "enableOutlining": True,
    "batchSerializationSettings.factor": 1,
    "batchSerializationSettings.concatOnVirtualGraphChange": True,
    "batchSerializationSettings.batchSchedule": 1,
    "accumulateOuterFragmentSettings.schedule": 1,
    "accumulateOuterFragmentSettings.excludedVirtualGraphs": ["0", "1"],
    "enableExplicitIR": True,
    "automaticLossScalingSettings.gradientTensorTrackingMethod": 1,
    "updatableNamedBuffers": ["buffer1", "buffer2"],
    "outlineThreshold": 10.0,
    "saveInitializersToFile": "weights.onnx",
}


def test_all_kinds_of_known_settings_pass():
    own = options()
    for key, value in FULL.items():
        own._Popart.set(key, value)
    own._Popart.setPatterns({"PadSum": True}, 0)
    validate(own.toDict())


def test_no_key_is_in_two_tables():
    tables = (popart_keys.BOOL, popart_keys.FLOAT, popart_keys.INT, popart_keys.STRING)
    keys = [key for table in (*tables, popart_keys.SEQUENCE, popart_keys.MAP) for key in table]
    assert len(keys) == len(set(keys))


REFUSED = [
    ("asdfasdf", True, "Unknown bool option asdfasdf"),
    ("outlineThreshold", 10, "Unknown uint64 option outlineThreshold.*floating point"),
    ("enableOutlining", 1, "Unknown uint64 option enableOutlining.*bool"),
    ("enableOutlinin", True, "Unknown bool option.*did you mean 'enableOutlining'"),
    ("nonsense", 1.5, "Unknown floating point option nonsense"),
    ("nonsense", "a", "Unknown string option nonsense"),
    ("nonsense", ["a"], "Unknown set / vector option nonsense"),
    ("nonsense", {"a": "b"}, "Unknown map option nonsense"),
    ("dotChecks", torch.ones(2), "Unknown value type Tensor for option dotChecks"),
    ("dotChecks", [1], "Unknown value type int for option dotChecks"),
    ("engineOptions", {"a": 1}, r"Unknown value type int for option engineOptions\[a\]"),
    ("autoRecomputation", 5, "autoRecomputation is 5, which is out of range: it can be 0 to 4"),
    ("autoRecomputation", -1, "out of range"),
    ("numIOTiles", -4, "numIOTiles"),
    ("hardwareInstrumentations", {2}, "out of range"),
    ("accumulateOuterFragmentSettings.excludedVirtualGraphs", ["x"], "Unknown value type"),
    ("patterns", {"PadSum": True}, "patterns_level"),
    ("random_seed", "x", "random_seed"),
    ("firstDotOp", -1, "negative"),
]


@pytest.mark.parametrize(("key", "value", "text"), REFUSED)
def test_bad_settings_are_stored_and_refused_when_compiling(key, value, text):
    own = options().engine("eager")
    own._Popart.set(key, value)
    with pytest.raises(poptorch.Error, match=text):
        validate(own.toDict())
    model = poptorch.inferenceModel(torch.nn.Linear(1, 1), own)
    with pytest.raises(poptorch.Error, match=text):
        model(torch.ones(1, 1))


def test_a_bool_that_is_no_bool_passes_the_setter_and_fails_when_compiling():
    own = options()
    own.Precision.enableStochasticRounding("yes")
    with pytest.raises(poptorch.Error, match="Unknown string option enableStochasticRounding"):
        validate(own.toDict())


def test_memory_proportions_are_numbers():
    with pytest.raises(poptorch.Error, match="available_memory_proportion"):
        validate(options().setAvailableMemoryProportion({"IPU0": "half"}).toDict())


def test_the_deprecated_mean_strategy_is_out_of_range():
    own = options()
    own.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.PostAndLoss)
    with pytest.raises(poptorch.Error, match="out of range"):
        validate(own.toDict())


def test_locations_hold_known_settings_only():
    own = options()
    own.TensorLocations.set(location_weight={"onchip": 1})
    with pytest.raises(poptorch.Error, match="did you mean 'onChip'"):
        validate(own.toDict())


def test_compiling_logs_every_value(caplog):
    own = options().engine("eager").enableSyntheticData(True).setExecutionStrategy(poptorch.ShardedExecution())
    own._Popart.set("dotChecks", ["FINAL"]).setEngineOptions({"debug.allowOutOfMemory": "true"})
    with caplog.at_level(logging.DEBUG, logger="poptorch::python"):
        poptorch.inferenceModel(torch.nn.Linear(1, 1), own).compile(torch.ones(1, 1))
    for line in (
        "poptorch.Options set replication_factor to value 1",
        "poptorch.Options set device_iterations to value 1",
        "poptorch.Options set execution_mode to value 1",
        "poptorch.Options set syntheticDataMode to value 2",
        "poptorch.Options added FINAL to dotChecks",
        "poptorch.Options set engineOptions[debug.allowOutOfMemory] to true",
    ):
        assert line in caplog.text


def test_anchors_are_logged_with_mode_and_period(caplog):
    own = options()
    for mode, period in ((OutputMode.All, 1), (OutputMode.EveryN, 4), (OutputMode.Final, 1), (OutputMode.Sum, 1)):
        own.anchorTensor(mode.name, "tensor", mode, period)
    with caplog.at_level(logging.DEBUG, logger="poptorch::python"):
        validate(own.toDict())
    for text in ("ALL/1", "EVERYN/4", "FINAL/1", "Sum/1"):
        assert text in caplog.text
