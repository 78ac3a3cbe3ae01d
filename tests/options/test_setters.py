"""Setters of `Options` and of its groups: what they store, and what they refuse."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

import poptorch
from poptorch import CommGroupType, ConnectionType, OutputMode, SyncPattern
from poptorch.options import Anchor

STORED = [
    (lambda o: o.useIpuModel(1), "use_model", True),
    (lambda o: o.connectionType(ConnectionType.OnDemand), "connection_type", 1),
    (lambda o: o.useOfflineIpuTarget(), "ipu_version", 2),
    (lambda o: o.useOfflineIpuTarget(21), "connection_type", ConnectionType.Never),
    (lambda o: o.useIpuId(3), "ipu_id", 3),
    (lambda o: o.autoRoundNumIPUs(), "auto_round_num_ipus", True),
    (lambda o: o.syncPattern(SyncPattern.SinglePipeline), "sync_pattern", 1),
    (lambda o: o.broadcastBuffers(False), "broadcast_buffers", False),
    (lambda o: o.modelName("m"), "model_name", "m"),
    (lambda o: o.logDir("d"), "log_dir", "d"),
    (lambda o: o.maxRepeatLogs(2), "max_repeat_logs", 2),
    (lambda o: o.maxRepeatLogs(None), "max_repeat_logs", 2**64 - 1),
    (lambda o: o.relaxOptimizerAttributesChecks(), "relax_optimizer_attributes_checks", True),
    (lambda o: o.allowShapeChanges(), "allow_shape_changes", True),
    (lambda o: o.runSideBySide(False), "side_by_side", False),
    (lambda o: o.disableModuleNamescope(), "module_namescope", False),
    (lambda o: o.sourceLocationExcludes(["a"]), "source_location_excludes", ["a"]),
    (
        lambda o: o.sourceLocationExcludes(["a"]).appendToLocationExcludes("b", "c"),
        "source_location_excludes",
        ["a", "b", "c"],
    ),
    (
        lambda o: o.setAvailableMemoryProportion({"IPU0": 0.2, "IPU3": 0.5}),
        "available_memory_proportion",
        {0: 0.2, 3: 0.5},
    ),
    (lambda o: o.replicationFactor(4).inputReplicaGrouping(2, CommGroupType.Orthogonal), "input_group_size", 2),
    (lambda o: o.inputReplicaGrouping(9, CommGroupType.NoGrouping), "input_group_size", 1),
    (lambda o: o.inputReplicaGrouping(9, CommGroupType.NoGrouping), "input_cgt", CommGroupType.Consecutive),
    (lambda o: o.anchorMode(OutputMode.EveryN, 3), "anchor_return_period", 3),
    (lambda o: o.anchorMode(OutputMode.Sum), "anchor_mode", OutputMode.Sum),
]


@pytest.mark.parametrize(("change", "key", "value"), STORED)
def test_setters_store_and_chain(change, key, value):
    options = poptorch.Options()
    assert change(options) is options
    assert getattr(options, key) == value


POPART = [
    (lambda o: o.enableExecutableCaching("d"), {"cachePath": "d", "enableEngineCaching": True}),
    (lambda o: o.enableExecutableCaching(Path("d")), {"cachePath": "d", "enableEngineCaching": True}),
    (
        lambda o: o.enableExecutableCaching("d").enableExecutableCaching(None),
        {"cachePath": "d", "enableEngineCaching": False},
    ),
    (lambda o: o.enableSyntheticData(True), {"syntheticDataMode": 2}),
    (lambda o: o.enableSyntheticData(False), {"syntheticDataMode": 0}),
    (lambda o: o.enableStableNorm(True), {"enableStableNorm": True}),
    (lambda o: o.logCycleCount(True), {"instrumentWithHardwareCycleCounter": True}),
    (lambda o: o.updatableNamedBuffers(["a", "b"]), {"updatableNamedBuffers": ["a", "b"]}),
    (lambda o: o.Training.setAutomaticLossScaling(True), {"automaticLossScalingSettings.enabled": True}),
    (lambda o: o.Precision.enableFloatingPointExceptions(True), {"enableFloatingPointChecks": True}),
    (lambda o: o.Precision.enableStochasticRounding(True), {"enableStochasticRounding": True}),
    (
        lambda o: o.Precision.setPartialsType(torch.half),
        {"partialsTypeMatMuls": "half", "convolutionOptions": {"partialsType": "half"}},
    ),
    (lambda o: o.GraphProcessing.setPartialsType(torch.float32), {"partialsTypeMatMuls": "float"}),
    (
        lambda o: (o.Precision.setPartialsType(torch.half), o.Training.setConvolutionDithering(True)),
        {"partialsTypeMatMuls": "half", "convolutionOptions": {"enableConvDithering": "true"}},
    ),
]


@pytest.mark.parametrize(("change", "expected"), POPART)
def test_some_setters_store_settings_of_the_graph_compiler(change, expected):
    options = poptorch.Options()
    change(options)
    assert {key: options._Popart.options[key] for key in expected} == expected
    poptorch.options.validate(options.outputMode(OutputMode.All).toDict())


REFUSED = [
    (lambda o: o.deviceIterations(2.0), AssertionError),
    (lambda o: o.deviceIterations(0), AssertionError),
    (lambda o: o.deviceIterations(-2), AssertionError),
    (lambda o: o.deviceIterations(False), AssertionError),
    (lambda o: o.replicationFactor(0), AssertionError),
    (lambda o: o.Training.gradientAccumulation(0), AssertionError),
    (lambda o: o.anchorTensor("x", "y", OutputMode.EveryN, 0), AssertionError),
    (lambda o: o.maxRepeatLogs(-1), AssertionError),
    (lambda o: o.useIpuId(-1), AssertionError),
    (lambda o: o.setAvailableMemoryProportion({"IPU-1": 0.2}), AssertionError),
    (lambda o: o.Distributed.configureProcessId(0, 0), AssertionError),
    (lambda o: o.Distributed.configureProcessId(-1, 2), AssertionError),
    (lambda o: o.Distributed.configureProcessId(2, 2), AssertionError),
    (lambda o: poptorch.TensorLocationSettings().minElementsForOffChip(-1), AssertionError),
    (lambda o: poptorch.TensorLocationSettings().minElementsForReplicatedTensorSharding(-1), AssertionError),
    (lambda o: poptorch.Stage("a").ipu(-1), AssertionError),
    (lambda o: poptorch.Phase("a").ipus(-1), AssertionError),
    (lambda o: o.useIpuModel(torch.ones(2)), AssertionError),
    (lambda o: o.enableSyntheticData(torch.ones(2)), AssertionError),
    (lambda o: o.engine({}), AssertionError),
    (lambda o: o.loadFromFile(3), AssertionError),
    (lambda o: o.from_json({}), AssertionError),
    (lambda o: o.replicationFactor("2"), AssertionError),
    (lambda o: o.outputMode("All"), AssertionError),
    (lambda o: o.outputMode(OutputMode.EveryN), AssertionError),
    (lambda o: o.outputMode(OutputMode.EveryN, 2.5), AssertionError),
    (lambda o: o.inputReplicaGrouping(2, CommGroupType.All), ValueError),
    (lambda o: o.replicationFactor(4).inputReplicaGrouping(8, CommGroupType.Consecutive), ValueError),
    (lambda o: o.replicationFactor(4).inputReplicaGrouping(3, CommGroupType.Orthogonal), ValueError),
    (lambda o: o.inputReplicaGrouping(0, CommGroupType.Consecutive), ValueError),
    (lambda o: o.inputReplicaGrouping(1, "Consecutive"), AssertionError),
    (lambda o: o.setExecutionStrategy("sharded"), AssertionError),
    (lambda o: o.setAvailableMemoryProportion({"0": 0.2}), AssertionError),
    (lambda o: o.setAvailableMemoryProportion({0: 0.2}), AssertionError),
    (lambda o: o.setAvailableMemoryProportion({"IPUx": 0.2}), ValueError),
    (lambda o: o.setAvailableMemoryProportion([0.2]), AssertionError),
    (lambda o: o.randomSeed(1.0), AssertionError),
    (lambda o: o.randomSeed(2**80), AssertionError),
    (lambda o: o.connectionType(1), AssertionError),
    (lambda o: o.syncPattern(0), AssertionError),
    (lambda o: o.useIpuId("0"), AssertionError),
    (lambda o: o.useOfflineIpuTarget(3), AssertionError),
    (lambda o: o.autoRoundNumIPUs("yes"), AssertionError),
    (lambda o: o.broadcastBuffers(2), AssertionError),
    (lambda o: o.allowShapeChanges(1), AssertionError),
    (lambda o: o.modelName(3), AssertionError),
    (lambda o: o.logDir(None), AssertionError),
    (lambda o: o.maxRepeatLogs("4"), AssertionError),
    (lambda o: o.enableExecutableCaching(5), AssertionError),
    (lambda o: o.enableProfiling(5), AssertionError),
    (lambda o: o.updatableNamedBuffers("buffer"), AssertionError),
    (lambda o: o.updatableNamedBuffers([1]), AssertionError),
    (lambda o: o.anchorTensor(1, "x"), AssertionError),
    (lambda o: o.anchorTensor("x", "y", "All"), AssertionError),
    (lambda o: o.anchorTensor("x", "y", OutputMode.EveryN, None), AssertionError),
    (lambda o: o.Precision.setPartialsType(torch.int32), ValueError),
    (lambda o: o.Precision.setPartialsType("half"), ValueError),
    (lambda o: o.Precision.enableFloatingPointExceptions(1), AssertionError),
    (lambda o: o.Precision.runningStatisticsAlwaysFloat(1), ValueError),
    (lambda o: o.Precision.halfFloatCasting(1), AssertionError),
    (lambda o: o.Training.setMeanAccumulationAndReplicationReductionStrategy(1), AssertionError),
    (lambda o: o.Jit.traceModel(True), ValueError),
    (lambda o: o.Distributed.configureProcessId("0", 1), AssertionError),
    (lambda o: o.TensorLocations.numIOTiles(10), AssertionError),
    (lambda o: o.TensorLocations.numIOTiles(193), AssertionError),
    (lambda o: o.TensorLocations.numIOTiles(33), AssertionError),
    (lambda o: o.TensorLocations.numIOTiles(32.0), AssertionError),
    (lambda o: o.TensorLocations.setWeightLocation({"onChip": 1}), AssertionError),
    (lambda o: poptorch.TensorLocationSettings().useOnChipStorage(1), AssertionError),
    (lambda o: poptorch.TensorLocationSettings().minElementsForOffChip(1.5), AssertionError),
    (lambda o: o._Popart.setPatterns(["PadSum"]), AssertionError),
    (lambda o: o._Popart.setPatterns({"PadSum": 1}), AssertionError),
    (lambda o: o._Popart.setPatterns({"PadSum": True}, "0"), AssertionError),
]


@pytest.mark.parametrize(("change", "error"), REFUSED)
def test_bad_values_raise_the_documented_type_at_once_and_change_nothing(change, error):
    options = poptorch.Options().replicationFactor(4)
    before = repr(options)
    with pytest.raises(error) as caught:
        change(options)
    assert isinstance(caught.value, poptorch.Error)
    assert repr(options) == before


@pytest.mark.parametrize("tiles", [32, 100, 192])
def test_tiles_for_transfers(tiles):
    locations = poptorch.Options().TensorLocations.numIOTiles(tiles)
    assert locations("numIOTiles") == tiles


@pytest.mark.parametrize("size", [1, 2, 4])
def test_groups_that_divide_the_replicas(size):
    options = poptorch.Options().replicationFactor(4)
    assert options.inputReplicaGrouping(size, CommGroupType.Consecutive).input_group_size == size


def test_location_settings_chain_and_are_copied_when_they_are_given():
    settings = (
        poptorch.TensorLocationSettings()
        .minElementsForOffChip(4)
        .minElementsForReplicatedTensorSharding(8)
        .useOnChipStorage(True)
        .useReplicatedTensorSharding()
        .useIOTilesToLoad()
        .useIOTilesToStore(False)
    )
    locations = poptorch.Options().TensorLocations
    for setter in ("setActivationLocation", "setWeightLocation", "setOptimizerLocation", "setAccumulatorLocation"):
        assert getattr(locations, setter)(settings) is locations
    settings.useOnChipStorage(None)
    assert locations.location_weight == {
        "minElementsForOffChip": 4,
        "minElementsForReplicatedTensorSharding": 8,
        "onChip": 1,
        "useReplicatedTensorSharding": 1,
        "useIOTilesToLoad": 1,
        "useIOTilesToStore": 0,
    }
    assert "onChip" not in settings.toDict()


def test_a_model_with_four_locations_runs():
    options = poptorch.Options().engine("eager")
    off_chip = poptorch.TensorLocationSettings().useOnChipStorage(False)
    options.TensorLocations.setActivationLocation(off_chip).setWeightLocation(off_chip)
    options.TensorLocations.setOptimizerLocation(off_chip).setAccumulatorLocation(off_chip)
    model = poptorch.inferenceModel(torch.nn.Linear(2, 2), options)
    assert model(torch.ones(2)).shape == (2,)


def test_locations_and_shares_of_memory_change_no_result():
    class Sum(torch.nn.Module):
        def forward(self, x, y):
            with poptorch.Block(ipu_id=0):
                x = x * 2
            with poptorch.Block(ipu_id=1):
                return x @ y

    options = poptorch.Options().deviceIterations(2).setAvailableMemoryProportion({"IPU0": 0.7, "IPU1": 0.2})
    settings = poptorch.TensorLocationSettings().minElementsForOffChip(4).useOnChipStorage(False)
    options.TensorLocations.setActivationLocation(settings).setWeightLocation(settings)
    options.TensorLocations.setOptimizerLocation(settings).setAccumulatorLocation(settings)
    x, y = torch.randn(2, 1, 3), torch.randn(2, 3, 4)
    torch.testing.assert_close(poptorch.inferenceModel(Sum(), options)(x, y), Sum()(x, y))


def test_anchors_are_recorded_even_on_frozen_options_and_return_nothing():
    options = poptorch.Options()
    options._freeze()
    assert options.anchorTensor("a", "long") is None
    options.anchorTensor("b", "long", OutputMode.EveryN, 4)
    options.anchorTensor("c", "long", OutputMode.Final, 4)
    options.anchorTensor("d", "long", anchor_mode=OutputMode.EveryN, anchor_return_period=2)
    assert options.anchored_tensors == {
        "a": Anchor("long", None, 1),
        "b": Anchor("long", OutputMode.EveryN, 4),
        "c": Anchor("long", OutputMode.Final, 1),
        "d": Anchor("long", OutputMode.EveryN, 2),
    }


def test_anchors_without_a_mode_follow_the_model_when_it_is_wrapped():
    options = poptorch.Options().deviceIterations(4).outputMode(OutputMode.EveryN, 2)
    options.anchorTensor("a", "long")
    executor = poptorch.inferenceModel(torch.nn.Linear(1, 1), options)
    assert executor.options.anchored_tensors["a"] == Anchor("long", OutputMode.EveryN, 2)
    assert options.anchored_tensors["a"].output_mode is None


def test_profiling_merges_into_the_engine_options():
    options = poptorch.Options()
    options._Popart.setEngineOptions({"target.workers": "3"})
    options.enableProfiling("reports")
    assert options._Popart.options["engineOptions"] == {
        "target.workers": "3",
        "debug.allowOutOfMemory": "true",
        "autoReport.directory": "reports",
        "autoReport.all": "true",
    }
    assert poptorch.Options().profile(True)._Popart.options["engineOptions"]["autoReport.directory"] == "."


def test_profiling_does_not_add_to_what_is_no_dictionary():
    options = poptorch.Options()
    options._Popart.set("engineOptions", 5)
    with pytest.raises(poptorch.Error, match="they are 5, not a dictionary"):
        options.enableProfiling()


def test_profiling_warns_if_the_environment_wins(monkeypatch, caplog):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all": "false"}')
    poptorch.Options().enableProfiling("reports")
    assert "autoReport.all" in caplog.text


def test_pipelining_switch_of_early_releases():
    assert type(poptorch.Options().enablePipelining(False)._execution_strategy) is poptorch.ShardedExecution
    assert type(poptorch.Options().enablePipelining(True)._execution_strategy) is poptorch.PipelinedExecution


@pytest.mark.parametrize(
    "change", [lambda o: o.Precision.runningVarianceAlwaysFloat(True), lambda o: o.Jit.traceModel(False)]
)
def test_deprecated_setters_warn_and_chain(change, caplog):
    with caplog.at_level(logging.WARNING, logger="poptorch::python"):
        assert change(poptorch.Options()) is not None
    assert "deprecated" in caplog.text


def test_older_names_are_the_same_objects():
    options = poptorch.Options()
    assert options.GraphProcessing is options.Precision
    assert options.Popart is options._Popart
    assert options.defaultAnchorMode()
    options.Training.accumulationReductionType(poptorch.ReductionType.Sum)
    assert options.Training.accumulation_and_replication_reduction_type is poptorch.ReductionType.Sum


def test_without_a_launcher_there_is_one_process(monkeypatch):
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    distributed = poptorch.Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (0, 1)


def test_open_mpi_tells_the_process_its_place(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    distributed = poptorch.Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (3, 4)
    distributed.disable()
    assert (distributed.processId, distributed.numProcesses) == (0, 1)


def test_other_variables_can_tell_the_place_too(monkeypatch):
    monkeypatch.setenv("SIZE", "2")
    monkeypatch.setenv("RANK_OF_MINE", "1")
    distributed = poptorch.Options().Distributed.setEnvVarNames("SIZE", "RANK_OF_MINE")
    assert (distributed.distributed_process_id, distributed.num_distributed_processes) == (1, 2)
    monkeypatch.setenv("SIZE", "two")
    with pytest.raises(ValueError, match="SIZE is 'two'"):
        distributed.setEnvVarNames("SIZE", "RANK_OF_MINE")


@pytest.mark.parametrize(("size", "rank"), [("2", "2"), ("0", "0"), ("2", "-1"), ("1", "1")])
def test_a_place_that_does_not_exist_is_refused_with_the_variables(size, rank, monkeypatch):
    monkeypatch.setenv("SIZE", size)
    monkeypatch.setenv("RANK_OF_MINE", rank)
    with pytest.raises(ValueError, match=f"RANK_OF_MINE is {rank} and SIZE is {size}"):
        poptorch.Options().Distributed.setEnvVarNames("SIZE", "RANK_OF_MINE")


def test_any_pair_of_process_and_count_round_trips():
    distributed = poptorch.Options().Distributed.configureProcessId(5, 15)
    assert (distributed.processId, distributed.numProcesses) == (5, 15)
    assert distributed.IPUoFConfigFiles("file").ipuof_configs == {0: "file"}


def test_the_cache_folder_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "cached")
    assert poptorch.Options()._Popart.options["cachePath"] == "cached"
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "")
    assert "cachePath" not in poptorch.Options()._Popart.options
    assert os.environ["POPTORCH_CACHE_DIR"] == ""


def test_the_mean_strategy_can_be_read_after_compiling():
    options = poptorch.Options().engine("eager")
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.Running)
    model = poptorch.inferenceModel(torch.nn.Linear(1, 1), options)
    model(torch.ones(1, 1))
    assert options.Training.meanAccumulationAndReplicationReductionStrategy is poptorch.MeanReductionStrategy.Running
