"""What every group of options can do: keys, typed assignment, freezing, copying, printing."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch

import poptorch
from poptorch import ConnectionType, OutputMode

GROUPS = ("Training", "Precision", "Jit", "Distributed", "TensorLocations", "_Popart")


def test_calling_with_a_key_reads_it():
    options = poptorch.Options().deviceIterations(7)
    assert options("device_iterations") == 7
    with pytest.raises(AssertionError, match="did you mean 'device_iterations'"):
        options("device_iteration")


def test_values_that_were_never_set_do_not_exist():
    options = poptorch.Options()
    assert not options.exists("ipu_id")
    options.useIpuId(3)
    assert options.exists("ipu_id")
    options._freeze()
    options.deleteIfExists("ipu_id")
    options.deleteIfExists("ipu_id")
    assert not options.exists("ipu_id")


def test_truth_is_stored_as_a_number_where_numbers_are_stored():
    options = poptorch.Options().deviceIterations(True)
    assert type(options.device_iterations) is int
    options.device_iterations = True
    options.device_iterations = 5
    assert options.device_iterations == 5


@pytest.mark.parametrize("value", [2.0, "2", None])
def test_assignment_checks_the_type(value):
    with pytest.raises(AssertionError, match="device_iterations"):
        poptorch.Options().device_iterations = value


def test_assignment_has_the_limits_of_the_setter():
    options = poptorch.Options()
    with pytest.raises(AssertionError, match="device_iterations is 0, but must be at least 1"):
        options.device_iterations = 0
    with pytest.raises(AssertionError, match="num_distributed_processes is 0"):
        options.Distributed.set(num_distributed_processes=0)
    assert options.device_iterations == options.Distributed.numProcesses == 1


@pytest.mark.parametrize("key", [{}, [], None, 3])
@pytest.mark.parametrize(
    "use",
    [
        lambda o, key: o(key),
        lambda o, key: o.exists(key),
        lambda o, key: o.deleteIfExists(key),
        lambda o, key: o._Popart.set(key, 3),
        lambda o, key: poptorch.PipelinedExecution("a").stage(key),
    ],
)
def test_names_are_strings(use, key):
    with pytest.raises(AssertionError, match="takes a str, not") as caught:
        use(poptorch.Options(), key)
    assert isinstance(caught.value, poptorch.Error)


def test_setting_several_values_is_all_or_nothing():
    options = poptorch.Options()
    with pytest.raises(AssertionError, match="replication_factor"):
        options.set(device_iterations=3, replication_factor="4")
    assert options.device_iterations == 1


@pytest.mark.parametrize(
    ("read", "suggestion"),
    [
        (lambda o: o.deviceIteration(2), "deviceIterations"),
        (lambda o: o.replicationFactr(2), "replicationFactor"),
        (lambda o: o.Training.gradient_acumulation, "gradient_accumulation"),
        (lambda o: o.TensorLocations.numIoTiles(32), "numIOTiles"),
    ],
)
def test_an_unknown_name_offers_the_nearest_known_one(read, suggestion):
    with pytest.raises(AttributeError, match=f"did you mean '{suggestion}'"):
        read(poptorch.Options())


def test_options_take_no_new_private_attributes():
    with pytest.raises(AttributeError, match="_mine"):
        poptorch.Options()._mine = 1


def test_the_class_of_a_group_can_be_replaced_by_a_subclass():
    class Mine(poptorch.options._DistributedOptions):
        pass

    options = poptorch.Options()
    options.Distributed.__class__ = Mine
    assert isinstance(options.Distributed, Mine)


CHANGES = [
    lambda o: o.randomSeed(42),
    lambda o: o.set(random_seed=42),
    lambda o: o.Training.gradientAccumulation(0),
    lambda o: o._Popart.set("groupNormStridedChannelGrouping", True),
    lambda o: o.Precision.enableStochasticRounding(True),
    lambda o: o.Precision.setPartialsType(None),
    lambda o: o.Jit.traceModel(False),
    lambda o: o.Distributed.configureProcessId(0, 1),
    lambda o: o.TensorLocations.numIOTiles(32),
    lambda o: o.setExecutionStrategy(poptorch.ShardedExecution()),
    lambda o: o.enableExecutableCaching(None),
    lambda o: o.outputMode(OutputMode.All),
]


@pytest.mark.parametrize("change", CHANGES)
def test_frozen_options_refuse_every_change(change):
    options = poptorch.Options()
    options._freeze()
    with pytest.raises(AttributeError, match="Can't modify frozen Options") as caught:
        change(options)
    assert not isinstance(caught.value, poptorch.Error)


def test_freezing_reaches_every_group():
    options = poptorch.Options()
    options._freeze()
    for name in GROUPS:
        with pytest.raises(AttributeError):
            getattr(options, name).checkIsFrozen()
    options._unfreeze()
    for name in GROUPS:
        getattr(options, name).checkIsFrozen()


def test_a_clone_has_its_own_compiler_settings_shared_by_its_groups():
    options = poptorch.Options()
    twin = options.clone()
    twin.Precision.enableStochasticRounding(True)
    assert twin._Popart.options["enableStochasticRounding"] is True
    assert "enableStochasticRounding" not in options._Popart.options
    assert twin._popart is twin._Popart


def test_a_copy_is_independent_in_every_part():
    options = poptorch.Options().deviceIterations(5).replicationFactor(2).logDir("logs")
    options.outputMode(OutputMode.EveryN, 5).setAvailableMemoryProportion({"IPU0": 0.5})
    options.Distributed.configureProcessId(5, 15)
    options.Training.gradientAccumulation(4)
    options._Popart.set("autoRecomputation", 3).set("unknown", 5)
    options.TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(True))
    twin = copy.deepcopy(options)
    before = repr(twin)
    options.deviceIterations(4).Distributed.configureProcessId(2, 15)
    options._Popart.set("autoRecomputation", 2)
    options.TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
    options.anchorTensor("grad", "Gradient___w")
    assert repr(twin) == before
    assert (twin.device_iterations, twin.Distributed.processId, twin.Distributed.numProcesses) == (5, 5, 15)
    assert twin.TensorLocations.location_weight == {"onChip": 1}
    assert twin.anchored_tensors == {}


def test_copies_and_pickles_of_frozen_options():
    options = poptorch.Options().randomSeed(3)
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage("a").ipu(1), ["b", "c"]))
    options._freeze()
    restored = pickle.loads(pickle.dumps(options))
    assert repr(restored) == repr(options) == repr(options.clone())
    with pytest.raises(AttributeError, match="frozen"):
        restored.deviceIterations(2)
    options.clone().deviceIterations(2).Training.gradientAccumulation(2)
    copy.deepcopy(options.Training).gradientAccumulation(3)


def test_equality_is_identity():
    options = poptorch.Options()
    assert options == options
    assert options != poptorch.Options()


def test_the_text_holds_every_value_and_every_group():
    options = poptorch.Options().replicationFactor(4).useIpuId(2).connectionType(ConnectionType.Never)
    text = str(options)
    assert text.startswith("Options(")
    for key, value in options._values.items():
        assert f"{key}=" in text, (key, value)
    assert "replication_factor=4" in text
    assert "connection_type=ConnectionType.Never" in text
    for name in GROUPS:
        assert repr(getattr(options, name)) in text
    assert f"{id(options):x}" not in text


def test_the_order_of_calls_does_not_show_in_the_text():
    one = poptorch.Options().useIpuId(1).modelName("m").enableStableNorm(True).enableSyntheticData(True)
    two = poptorch.Options().enableSyntheticData(True).enableStableNorm(True).modelName("m").useIpuId(1)
    assert repr(one) == repr(two)


def test_a_notebook_shows_a_table_with_changes_in_bold():
    html = poptorch.Options().deviceIterations(3).modelName("<m>")._repr_html_()
    assert "<td>device_iterations</td><td><b>3</b></td>" in html
    assert "<td>replication_factor</td><td>1</td>" in html
    assert "&lt;m&gt;" in html
    assert "Training.gradient_accumulation" in html


DOCUMENTED_KEYS = """
    replication_factor input_group_size input_cgt broadcast_buffers device_iterations log_dir max_repeat_logs
    auto_round_num_ipus anchored_tensors output_mode output_return_period connection_type sync_pattern
    available_memory_proportion gradient_accumulation accumulation_and_replication_reduction_type
    meanAccumulationAndReplicationReductionStrategy num_distributed_processes distributed_process_id ipuof_configs
    execution_mode
""".split()  # noqa: SIM905


def test_the_dictionary_merges_everything_under_the_documented_keys():
    options = poptorch.Options().outputMode(OutputMode.All).replicationFactor(3).useIpuId(5)
    options._Popart.set("outlineThreshold", 10.0)
    values = options.toDict()
    assert set(DOCUMENTED_KEYS) <= set(values)
    assert (values["replication_factor"], values["ipu_id"], values["outlineThreshold"]) == (3, 5, 10.0)
    assert options.Training.toDict()["gradient_accumulation"] == 1


def test_the_dictionary_needs_an_output_mode():
    with pytest.raises(AssertionError, match="outputMode"):
        poptorch.Options().toDict()


def test_a_key_that_is_set_in_two_places_is_refused():
    options = poptorch.Options().outputMode(OutputMode.All)
    options._Popart.set("device_iterations", 3)
    with pytest.raises(AssertionError, match="device_iterations"):
        options.toDict()


def test_the_dictionary_of_an_executor_is_complete():
    executor = poptorch.inferenceModel(torch.nn.Linear(2, 2), poptorch.Options().engine("eager").replicationFactor(2))
    assert executor.options.toDict()["replication_factor"] == 2
    assert executor.options.toDict()["output_mode"] == OutputMode.All
    with pytest.raises(AttributeError, match="frozen"):
        executor.options.set(random_seed=42)


def test_a_period_without_every_n_is_stored_and_mentioned(caplog):
    with caplog.at_level(logging.INFO, logger="poptorch::python"):
        options = poptorch.Options().outputMode(OutputMode.All, 5)
    assert options.output_return_period == 5
    assert "ignored" in caplog.text


@pytest.mark.parametrize("mode", OutputMode)
def test_every_mode_takes_a_period(mode):
    assert poptorch.Options().outputMode(mode, output_return_period=5).output_mode is mode
