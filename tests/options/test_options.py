"""Options: setters check and chain, wrapping freezes, clones are free."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import poptorch
from models import Regression
from poptorch import OutputMode, ReductionType
from poptorch.options import resolve

SETTERS = [
    (lambda o: o.deviceIterations(4), lambda o: o.device_iterations, 4),
    (lambda o: o.replicationFactor(2), lambda o: o.replication_factor, 2),
    (lambda o: o.outputMode(OutputMode.Sum), lambda o: o.output_mode, OutputMode.Sum),
    (lambda o: o.outputMode(OutputMode.EveryN, 3), lambda o: o.output_return_period, 3),
    (lambda o: o.randomSeed(7), lambda o: o.random_seed, 7),
    (lambda o: o.showCompilationProgressBar(False), lambda o: o.show_compilation_progress_bar, False),
]


@pytest.mark.parametrize(("change", "read", "value"), SETTERS)
def test_setters_chain_and_can_be_read_back(change, read, value):
    options = poptorch.Options()
    assert change(options) is options
    assert read(options) == value


def test_training_setters_chain_and_can_be_read_back():
    training = poptorch.Options().Training
    assert training.gradientAccumulation(8) is training
    assert training.gradient_accumulation == 8
    training.accumulationAndReplicationReductionType(ReductionType.Sum)
    assert training.accumulation_and_replication_reduction_type is ReductionType.Sum


def test_defaults():
    options = poptorch.Options()
    assert (options.device_iterations, options.replication_factor, options.Training.gradient_accumulation) == (1, 1, 1)
    assert options.output_mode is OutputMode.Default
    assert options.defaultOutputMode()
    assert type(options._execution_strategy) is poptorch.PipelinedExecution
    assert options.Training.accumulation_and_replication_reduction_type is ReductionType.Mean


@pytest.mark.parametrize("value", [1.5, "4", None])
@pytest.mark.parametrize("setter", ["deviceIterations", "replicationFactor", "randomSeed"])
def test_counts_must_be_integers(setter, value):
    with pytest.raises(AssertionError, match=setter):
        getattr(poptorch.Options(), setter)(value)


def test_gradient_accumulation_must_be_an_integer():
    with pytest.raises(AssertionError, match="gradientAccumulation"):
        poptorch.Options().Training.gradientAccumulation(2.0)


def test_output_mode_must_be_a_mode():
    with pytest.raises(AssertionError, match=r"OutputMode\.All"):
        poptorch.Options().outputMode("All")


@pytest.mark.parametrize("period", [None, 0, -1])
def test_every_n_needs_a_positive_period(period):
    with pytest.raises(AssertionError, match="output_return_period"):
        poptorch.Options().outputMode(OutputMode.EveryN, period)


@pytest.mark.parametrize("kind", [ReductionType.NoReduction, "Mean", 1])
def test_reduction_is_mean_or_sum(kind):
    with pytest.raises(ValueError, match="Mean"):
        poptorch.Options().Training.accumulationAndReplicationReductionType(kind)


def test_engine_must_exist():
    with pytest.raises(AssertionError, match=r"'inductor'.*'eager'"):
        poptorch.Options().engine("fast")


def test_random_seed_seeds_the_host_at_once():
    poptorch.Options().randomSeed(11)
    first = torch.rand(2)
    torch.manual_seed(11)
    assert torch.equal(torch.rand(2), first)


def test_assignment_stores_like_a_setter():
    options = poptorch.Options()
    options.replication_factor = 4
    assert options.replication_factor == 4
    with pytest.raises(AssertionError, match="replication_factor"):
        options.replication_factor = "4"
    with pytest.raises(AssertionError, match="no_such_option"):
        options.no_such_option = 1


def test_unknown_and_unset_options_are_attribute_errors():
    with pytest.raises(AttributeError, match="no_such_option"):
        poptorch.Options().no_such_option
    with pytest.raises(AttributeError, match="random_seed"):
        poptorch.Options().random_seed


CHANGES = [
    lambda o: o.deviceIterations(2),
    lambda o: o.Training.gradientAccumulation(2),
    lambda o: setattr(o, "replication_factor", 2),
    lambda o: setattr(o.Training, "gradient_accumulation", 2),
    lambda o: o.checkIsFrozen(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_wrapping_freezes_the_options(change):
    options = poptorch.Options().engine("eager")
    poptorch.inferenceModel(Regression(), options)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        change(options)


@pytest.mark.parametrize("change", CHANGES)
def test_clone_of_frozen_options_can_be_changed(change):
    options = poptorch.Options()
    options._freeze()
    change(options.clone())
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        change(options)


def test_clones_are_independent():
    options = poptorch.Options().deviceIterations(2)
    twin = options.clone()
    twin.deviceIterations(3).Training.gradientAccumulation(4)
    assert (options.device_iterations, options.Training.gradient_accumulation) == (2, 1)
    assert (twin.device_iterations, twin.Training.gradient_accumulation) == (3, 4)


def test_unfreezing_allows_changes_again():
    options = poptorch.Options()
    options._freeze()
    options._unfreeze()
    assert options.deviceIterations(2).Training.gradientAccumulation(2).gradient_accumulation == 2


def test_the_users_options_keep_the_default_output_mode():
    options = poptorch.Options().engine("eager")
    model = Regression()
    training = poptorch.trainingModel(model, options)
    inference = poptorch.inferenceModel(model, options)
    assert options.output_mode is OutputMode.Default
    assert training.options.output_mode is OutputMode.Final
    assert inference.options.output_mode is OutputMode.All


def test_equal_settings_print_equal_and_others_do_not():
    one, two = poptorch.Options().deviceIterations(4), poptorch.Options().deviceIterations(4)
    assert repr(one) == repr(two)
    assert repr(one) != repr(poptorch.Options())
    assert repr(one) != repr(poptorch.Options().deviceIterations(4).clone().Training.gradientAccumulation(2))


def test_repr_shows_every_value_and_the_training_options():
    text = repr(poptorch.Options().replicationFactor(4))
    assert text.startswith("Options(")
    assert "replication_factor=4" in text
    assert "gradient_accumulation=1" in text
    assert " at 0x" not in text


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_options_can_be_copied_and_pickled(duplicate):
    options = poptorch.Options().deviceIterations(4).outputMode(OutputMode.EveryN, 2)
    options.Training.gradientAccumulation(3)
    assert repr(duplicate(options)) == repr(options)


def test_settings_are_resolved_per_kind_of_model():
    options = poptorch.Options().deviceIterations(2)
    options.Training.gradientAccumulation(3)
    training, inference = resolve(options, training=True), resolve(options, training=False)
    assert (training.batching.output_mode, training.batching.micro_batches) == (OutputMode.Final, 6)
    assert (inference.batching.output_mode, inference.batching.micro_batches) == (OutputMode.All, 2)
