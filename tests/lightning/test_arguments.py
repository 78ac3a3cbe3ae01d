"""Which parts a Trainer gets for its arguments."""

from __future__ import annotations

import warnings

import pytest
import torch

import poptorch
from lightning_runs import QUIET, line_class, loader, pl, root
from poptorch.lightning import IPUAccelerator, IPUPlugin, IPUPrecision, IPUStrategy, for_package
from poptorch.lightning.packages import ROOTS

MisErr = pl.utilities.exceptions.MisconfigurationException


def build(**arguments):
    return pl.Trainer(**{**QUIET, **arguments})


def parts(run):
    return type(run.accelerator), type(run.strategy), type(run.precision_plugin), run.num_devices


def old_plugin(**arguments):
    with pytest.warns(DeprecationWarning, match="IPUPlugin"):
        return IPUPlugin(**arguments)


def test_by_name():
    run = build(accelerator="ipu", devices=8)
    assert parts(run) == (IPUAccelerator, IPUStrategy, IPUPrecision, 8)
    assert run.strategy.replication_factor == 8


def test_without_a_number_of_devices():
    assert build(accelerator="ipu").num_devices == 4


@pytest.mark.parametrize(
    "arguments",
    [
        lambda: {"strategy": IPUStrategy(), "accelerator": "ipu"},
        lambda: {"strategy": IPUStrategy(accelerator=IPUAccelerator())},
        lambda: {"strategy": "ipu_strategy"},
        lambda: {"strategy": IPUStrategy()},
        lambda: {"accelerator": IPUAccelerator()},
    ],
)
def test_other_ways_to_say_the_same(arguments):
    assert parts(build(devices=8, **arguments())) == (IPUAccelerator, IPUStrategy, IPUPrecision, 8)


def test_options_of_the_user_choose_ipus_without_a_warning():
    options = poptorch.Options().replicationFactor(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = build(strategy=IPUStrategy(training_opts=options))
    assert parts(run) == (IPUAccelerator, IPUStrategy, IPUPrecision, 2)


@pytest.mark.parametrize("arguments", [{}, {"accelerator": "auto"}])
def test_auto_is_not_the_ipu(arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not isinstance(build(**arguments).strategy, IPUStrategy)


def test_auto_is_the_ipu_on_request(monkeypatch):
    monkeypatch.setenv("POPTORCH_LIGHTNING_AUTO", "1")
    assert parts(build()) == (IPUAccelerator, IPUStrategy, IPUPrecision, 4)
    assert not isinstance(build(accelerator="cpu").strategy, IPUStrategy)


def test_variables_of_lightning_choose_ipus(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_ACCELERATOR", "ipu")
    monkeypatch.setenv("PL_TRAINER_DEVICES", "2")
    assert parts(build()) == (IPUAccelerator, IPUStrategy, IPUPrecision, 2)


def test_ipus_is_an_older_spelling():
    with pytest.warns(DeprecationWarning, match="accelerator='ipu', devices=8"):
        assert parts(build(ipus=8)) == (IPUAccelerator, IPUStrategy, IPUPrecision, 8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ipus_wins_over_devices():
    with pytest.warns(UserWarning, match="will be ignored"):
        assert build(accelerator="ipu", devices=1, ipus=8).num_devices == 8


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_another_accelerator_wins_over_ipus():
    with pytest.warns(UserWarning, match="will be ignored"):
        assert not isinstance(build(accelerator="cpu", ipus=1).strategy, IPUStrategy)


@pytest.mark.parametrize("ipus", [0, -1, "8", True, [1]])
def test_ipus_is_a_number(ipus):
    with pytest.raises(MisErr, match="single number"):
        build(ipus=ipus)


@pytest.mark.parametrize("devices", [[0, 1], 0, (1,), "two", 1.5, -2])
def test_devices_is_a_number(devices):
    with pytest.raises(MisErr):
        build(accelerator="ipu", devices=devices)


@pytest.mark.parametrize(("devices", "count"), [("2", 2), (-1, 4), ("-1", 4), (3, 3)])
def test_numbers_of_devices(devices, count):
    assert build(accelerator="ipu", devices=devices).num_devices == count


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("as_list", [False, True])
def test_a_strategy_among_the_plugins(as_list):
    plugin = IPUPlugin(device_iterations=2)
    run = build(plugins=[plugin] if as_list else plugin, ipus=1)
    assert run.strategy is plugin
    run.fit(line_class(pl)(), loader())
    executor = plugin.poptorch_models[pl.trainer.states.RunningStage.TRAINING]
    assert executor.options.toDict()["device_iterations"] == 2


def test_two_strategies_are_refused():
    for arguments in (
        {"plugins": [old_plugin()], "strategy": IPUStrategy()},
        {"plugins": [old_plugin(), IPUStrategy()]},
    ):
        with pytest.raises(MisErr, match="more than once"):
            build(**arguments)


def test_other_plugins_stay():
    class Files(pl.plugins.TorchCheckpointIO):
        pass

    files = Files()
    run = build(plugins=[IPUStrategy(), files], accelerator="ipu")
    assert run.strategy.checkpoint_io is files


@pytest.mark.parametrize("own", ROOTS)
@pytest.mark.parametrize("other", ROOTS)
def test_objects_of_either_package_are_taken_by_both(own, other):
    package, family, given = root(own), for_package(own), for_package(other)
    options = poptorch.Options().replicationFactor(2)
    strategy = given.IPUStrategy(
        device_iterations=3, training_opts=options, precision_plugin=given.IPUPrecision("16-mixed")
    )
    run = package.Trainer(strategy=strategy, accelerator=given.IPUAccelerator(), devices=2, **QUIET)
    assert parts(run) == (family.IPUAccelerator, family.IPUStrategy, family.IPUPrecision, 2)
    assert run.strategy.device_iterations == 3
    assert run.strategy.training_opts is options
    assert run.precision == "16-mixed"
    module = line_class(package)()
    run.fit(module, loader())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"accelerator": "ipu", "strategy": "ddp"}, "IPUs need the strategy"),
        ({"accelerator": "cpu", "strategy": "ipu_strategy"}, "contradicts the strategy"),
        ({"accelerator": "cpu", "plugins": [IPUPrecision("16-mixed")]}, "contradicts the precision"),
        ({"plugins": IPUPrecision()}, "contradicts the precision"),
        ({"accelerator": "ipu", "sync_batchnorm": True}, "sync_batchnorm"),
        ({"accelerator": "ipu", "num_nodes": 2}, "several processes"),
    ],
)
def test_combinations_that_cannot_be(arguments, text):
    with pytest.raises(MisErr, match=text):
        build(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"device_iterations": 0}, MisErr),
        ({"uneven_eval_batches": "pad"}, MisErr),
        ({"training_opts": 1}, TypeError),
        ({"inference_opts": {}}, TypeError),
        ({"nonsense": 1}, TypeError),
    ],
)
def test_arguments_of_the_strategy_are_checked(arguments, error):
    with pytest.raises(error):
        IPUStrategy(**arguments)


def test_without_ipus_nothing_starts(monkeypatch):
    monkeypatch.setenv("POPTORCH_NUM_IPUS", "0")
    with pytest.raises(MisErr, match="requires IPU devices"):
        IPUStrategy()
    with pytest.raises(MisErr, match="`IPUAccelerator` can not run on your system"):
        build(accelerator="ipu")
    assert not isinstance(build().strategy, IPUStrategy)


def test_devices_are_of_type_ipu():
    run = build(accelerator="ipu", devices=2)
    assert run.strategy.parallel_devices == [torch.device("ipu", 0), torch.device("ipu", 1)]
    assert run.strategy.root_device == torch.device("cpu")


def test_positions_of_the_arguments_are_those_of_older_releases():
    options = poptorch.Options(), poptorch.Options()
    strategy = IPUStrategy(None, 2, False, None, None, None, None, None, *options)
    assert (strategy.device_iterations, strategy.training_opts, strategy.inference_opts) == (2, *options)
    plugin = old_plugin(device_iterations=2, training_opts=options[0])
    assert (plugin.device_iterations, plugin.training_opts) == (2, options[0])
