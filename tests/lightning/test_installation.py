"""How programs find the accelerator: registries, import paths old and new, and a Trainer that understands `ipus=`."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import poptorch
import poptorch.lightning as ipu
from lightning_runs import QUIET, fit, line_class, loader, root, trainer
from poptorch.lightning.packages import ROOTS

BOTH = pytest.mark.parametrize("name", ROOTS)


def family(name):
    return ipu.for_package(name)


def test_the_two_names_of_the_precision_are_one_class():
    assert ipu.IPUPrecision is ipu.IPUPrecisionPlugin
    assert issubclass(ipu.IPUPlugin, ipu.IPUStrategy)


@BOTH
def test_both_registries_know_the_names(name):
    package = root(name)
    assert package.accelerators.AcceleratorRegistry["ipu"]["accelerator"] is family(name).IPUAccelerator
    assert package.strategies.StrategyRegistry["ipu_strategy"]["strategy"] is family(name).IPUStrategy


@BOTH
def test_registering_again_changes_nothing(name):
    before = root(name).Trainer.__init__
    ipu.register()
    ipu.register(name)
    ipu.install_legacy_api()
    assert root(name).Trainer.__init__ is before
    assert root(name).accelerators.AcceleratorRegistry["ipu"]["accelerator"] is family(name).IPUAccelerator


def test_import_poptorch_does_not_import_lightning(programs):
    code = "import sys; print([name for name in sys.modules if 'lightning' in name])"
    assert programs.run(code).output == "[]\n"


@pytest.mark.long
def test_without_lightning_the_error_names_both_packages(programs):
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if 'lightning' in name else find(name, package)
try:
    import poptorch.lightning
except ModuleNotFoundError as error:
    print(error)
"""
    output = programs.run(code).output
    assert "pip install lightning" in output
    assert "pytorch-lightning" in output


@pytest.mark.long
@pytest.mark.parametrize(
    "first",
    ["import poptorch", "import poptorch.lightning", ""],
    ids=["poptorch first", "poptorch.lightning first", "poptorch last"],
)
def test_a_program_that_only_names_pytorch_lightning(first):
    code = f"""
{first}
import pytorch_lightning as pl
from pytorch_lightning.plugins import TorchCheckpointIO
{"" if first else "import poptorch"}
from pytorch_lightning.plugins import IPUPlugin
from pytorch_lightning.strategies import IPUStrategy
trainer = pl.Trainer(ipus=2, logger=False, enable_checkpointing=False)
print(type(trainer.strategy) is IPUStrategy, trainer.num_devices)
import sys
print("lightning.pytorch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[0] == "True 2"
    assert ran.stdout.splitlines()[1] == str(first == "import poptorch.lightning")


@pytest.mark.long
def test_autoload_can_be_switched_off(programs):
    code = """
import os, sys
os.environ["POPTORCH_LIGHTNING_AUTOLOAD"] = "0"
from poptorch import late_imports
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "poptorch.late_imports"]
late_imports.configure()
print([finder for finder in sys.meta_path if type(finder).__module__ == "poptorch.late_imports"])
"""
    assert programs.run(code).output == "[]\n"


@BOTH
def test_import_paths_of_older_releases(name):
    package, own = root(name), family(name)
    expected = {
        "accelerators.IPUAccelerator": own.IPUAccelerator,
        "accelerators.ipu.IPUAccelerator": own.IPUAccelerator,
        "strategies.IPUStrategy": own.IPUStrategy,
        "strategies.ipu.IPUStrategy": own.IPUStrategy,
        "strategies.ipu.LightningIPUModule": ipu.LightningIPUModule,
        "plugins.IPUPlugin": own.IPUPlugin,
        "plugins.IPUPrecisionPlugin": own.IPUPrecision,
        "plugins.precision.IPUPrecisionPlugin": own.IPUPrecision,
        "plugins.precision.ipu.IPUPrecisionPlugin": own.IPUPrecision,
        "plugins.training_type.ipu.IPUPlugin": own.IPUPlugin,
    }
    for path, value in expected.items():
        module, _, attribute = path.rpartition(".")
        assert getattr(importlib.import_module(f"{package.__name__}.{module}"), attribute) is value


def test_the_add_on_package_has_our_classes():
    import lightning_graphcore
    from lightning_graphcore.accelerator import IPUAccelerator
    from lightning_graphcore.precision import IPUPrecision
    from lightning_graphcore.strategy import IPUStrategy

    assert lightning_graphcore.IPUStrategy is IPUStrategy is ipu.IPUStrategy
    assert lightning_graphcore.IPUAccelerator is IPUAccelerator is ipu.IPUAccelerator
    assert lightning_graphcore.IPUPrecision is IPUPrecision is ipu.IPUPrecision


@pytest.fixture
def uninstalled():
    ipu.uninstall()
    yield
    ipu.register()
    ipu.install_legacy_api()


@BOTH
def test_uninstall_takes_everything_back(name, uninstalled):
    package = root(name)
    assert "ipu" not in package.accelerators.AcceleratorRegistry
    assert "ipu_strategy" not in package.strategies.StrategyRegistry
    assert not hasattr(package.Trainer.__init__, "without_ipus")
    assert not hasattr(package.strategies, "IPUStrategy")
    assert not hasattr(package.plugins, "IPUPlugin")
    with pytest.raises(ImportError):
        importlib.import_module(f"{package.__name__}.plugins.training_type.ipu")
    with pytest.raises(TypeError, match="ipus"):
        package.Trainer(ipus=1, **QUIET)


def test_after_uninstall_later_imports_are_left_alone(programs):
    code = """
import poptorch.lightning
poptorch.lightning.uninstall()
import pytorch_lightning.strategies
print("ipu_strategy" in pytorch_lightning.strategies.StrategyRegistry)
"""
    assert programs.run(code).output == "False\n"


def test_our_own_trainer_needs_no_patch(uninstalled):
    with pytest.warns(DeprecationWarning, match="accelerator='ipu', devices=2"):
        run = ipu.Trainer(ipus=2, **QUIET)
    assert isinstance(run.strategy, ipu.IPUStrategy)
    assert run.num_devices == 2
    assert isinstance(ipu.Trainer(**QUIET, accelerator="cpu").strategy, type(trainer("cpu").strategy))


@BOTH
def test_a_fit_with_either_package(name):
    package = root(name)
    module = line_class(package)()
    run = fit(module, loader(4), loader(4), devices=2, package=package)
    assert type(run.strategy) is family(name).IPUStrategy
    assert run.global_step == 8


def test_version_too_old(monkeypatch):
    from poptorch.lightning import packages

    monkeypatch.setattr(importlib.import_module("lightning"), "__version__", "2.0.9")
    with pytest.raises(ImportError, match=r"Lightning 2\.. to 2\.6, and lightning is 2\.0\.9"):
        packages.check_version("lightning")


def plain_parts(run):
    parts = (run.accelerator, run.strategy, run.precision_plugin, *run.callbacks)
    numbers = {name: value for name, value in vars(run).items() if isinstance(value, (bool, int, float, str))}
    return [type(part) for part in parts], numbers, run.max_steps


@BOTH
def test_a_trainer_without_ipus_is_built_as_ever(name, monkeypatch):
    package = root(name)
    arguments = {"accelerator": "cpu", "precision": "bf16-mixed", "gradient_clip_val": 0.5, "max_steps": 3, **QUIET}
    patched = package.Trainer(**arguments)
    original = package.Trainer.__init__.without_ipus
    monkeypatch.setattr(package.Trainer, "__init__", original)
    plain = package.Trainer(**arguments)
    assert plain_parts(patched) == plain_parts(plain)
    monkeypatch.undo()
    with pytest.raises(TypeError, match="nonsense"):
        package.Trainer(nonsense=1, **QUIET)


def test_importing_costs_one_package_only():
    assert ipu.IPUStrategy is family("lightning").IPUStrategy
    assert poptorch.lightning is ipu
