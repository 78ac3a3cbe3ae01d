"""Types of weights, inputs and logged values."""

from __future__ import annotations

import pytest
import torch

import poptorch
from lightning_runs import Line, fit, loader, pl, root, trainer
from poptorch.lightning import IPUPlugin, IPUPrecision, IPUStrategy, for_package
from poptorch.lightning.packages import ROOTS

Stage = pl.trainer.states.RunningStage


class Types(Line):
    """Notes the types that hooks and steps see; what steps set on the module is undone after a capture."""

    noted = {}

    def on_train_start(self):
        self.weights = {parameter.dtype for parameter in self.parameters()}

    def training_step(self, batch, batch_idx):
        Types.noted = {"input": batch[0].dtype, "new": torch.zeros(1).dtype}
        loss = self.loss(batch)
        self.log("a", loss)
        return loss


@pytest.mark.parametrize(
    ("precision", "unified", "weights", "inputs", "new"),
    [
        (None, "32-true", torch.float32, torch.float32, torch.float32),
        (32, "32-true", torch.float32, torch.float32, torch.float32),
        ("16-mixed", "16-mixed", torch.float32, torch.float16, torch.float32),
        ("16-true", "16-true", torch.float16, torch.float16, torch.float16),
    ],
)
def test_types(precision, unified, weights, inputs, new):
    module = Types()
    run = fit(module, loader(8), precision=precision)
    assert run.precision == unified
    assert isinstance(run.precision_plugin, IPUPrecision)
    assert module.weights == {weights}
    assert Types.noted == {"input": inputs, "new": new}
    assert run.callback_metrics["a"].dtype == torch.float32
    assert run.scaler is None
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", ROOTS)
def test_sixteen_is_mixed(name):
    with pytest.warns(UserWarning, match="historical reasons"):
        run = trainer(precision=16, package=root(name))
    assert run.precision == "16-mixed"
    assert isinstance(run.precision_plugin, for_package(name).IPUPrecision)


def test_batches_are_cast_and_integers_are_not():
    run = trainer(precision="16-mixed")
    kinds = (torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool)
    batch = {"tensors": [torch.zeros(2, dtype=kind) for kind in kinds], "name": "x"}
    moved = run.strategy.batch_to_device(batch, torch.device("cpu"))
    assert [tensor.dtype for tensor in moved["tensors"]] == [torch.float16] * 2 + list(kinds[2:])
    assert moved["name"] == "x"


def test_convert_model_to_half():
    with pytest.warns(DeprecationWarning, match="IPUPlugin"):
        plugin = IPUPlugin(convert_model_to_half=True)
    module = Types()
    run = fit(module, loader(8), plugins=plugin, precision="16-mixed")
    assert run.precision == "16-true"
    assert module.weights == {torch.float16}


def test_a_half_module_stays_half():
    module = Types().half()
    fit(module, loader(8), precision="16-mixed")
    assert module.weights == {torch.float16}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16", "bf16-true", "64-true", 64, "transformer-engine"])
@pytest.mark.filterwarnings("ignore:.*historical reasons")
def test_other_precisions_are_refused(precision):
    with pytest.raises(ValueError, match="is not supported"):
        trainer(precision=precision)
    with pytest.raises(ValueError, match="is not supported"):
        trainer(plugins=IPUPrecision(precision))


def test_precision_given_in_other_ways():
    assert trainer(plugins=IPUPrecision("16-mixed")).precision == "16-mixed"
    assert trainer(strategy=IPUStrategy(precision_plugin=IPUPrecision("16-true"))).precision == "16-true"
    with pytest.raises(ValueError, match="Choose one"):
        trainer(plugins=IPUPrecision("16-mixed"), precision="16-mixed")


def test_a_foreign_precision_is_converted():
    strategy = IPUStrategy()
    strategy.precision_plugin = pl.plugins.HalfPrecision("16-true")
    assert isinstance(strategy.precision_plugin, IPUPrecision)
    assert strategy.precision_plugin.precision == "16-true"


def scaling(run):
    options = run.strategy.poptorch_models[Stage.TRAINING].options
    return options._Popart.options.get("automaticLossScalingSettings.enabled", False)


def test_mixed_precision_scales_the_loss_unless_the_user_does():
    assert scaling(fit(Line(), loader(8), precision="16-mixed"))
    assert not scaling(fit(Line(), loader(8)))
    chosen = Line(lambda m: poptorch.optim.SGD(m.parameters(), lr=0.01, loss_scaling=8.0))
    assert not scaling(fit(chosen, loader(8), precision="16-mixed"))
    options = IPUStrategy(training_opts=poptorch.Options())
    assert not scaling(fit(Line(), loader(8), precision="16-mixed", strategy=options))


class Tiny(Line):
    """A loss whose gradients are too small for float16."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * 1e-8


def test_scaling_saves_small_gradients():
    def moved(**arguments):
        module = Tiny(lambda m: torch.optim.SGD(m.parameters(), lr=1e6))
        before = module.fc.weight.detach().clone()
        fit(module, loader(8), max_epochs=10, **arguments)
        return (module.fc.weight - before).abs().mean().item()

    assert moved(precision="16-mixed") == pytest.approx(moved(), rel=0.1)
    assert moved(precision="16-mixed", strategy=IPUStrategy(training_opts=poptorch.Options())) == 0
