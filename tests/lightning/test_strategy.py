"""The life of a run: what the Trainer's arguments mean to it, how it ends, and what is left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch
from lightning_runs import Line, Logs, assert_same_weights, fit, loader, pl, trainer


def test_afterwards_the_module_is_plain_and_trained():
    module = Line()
    before = copy.deepcopy(module)
    names = set(vars(module)) | {"_hparams"}  # which Lightning adds
    fit(module, loader(8), loader(8))
    assert type(module) is Line
    assert type(module.fc.weight) is nn.Parameter
    assert set(vars(module)) - names == set()
    x = torch.randn(3, 32)
    assert not torch.equal(module(x), before(x))
    assert torch.equal(module(x), x @ module.fc.weight.T + module.fc.bias)


def test_the_model_of_the_strategy_is_the_wrapper():
    module = Line()
    run = fit(module, loader(8))
    assert isinstance(run.strategy.model, poptorch.lightning.LightningIPUModule)
    assert list(run.strategy.model.parameters()) == list(module.parameters())
    assert run.lightning_module is module


def test_one_trainer_for_everything():
    module = Logs()
    reference = copy.deepcopy(module)
    run = trainer(max_epochs=1)
    run.fit(module, loader(8), loader(8))
    run.fit_loop.max_epochs = 3
    run.fit(module, loader(8), loader(8))
    assert run.current_epoch == 3
    run.validate(module, loader(8), verbose=False)
    run.test(module, loader(8), verbose=False)
    assert torch.cat(run.predict(module, loader(8))).shape == (64, 2)
    fit(reference, loader(8), accelerator="cpu", max_epochs=3)
    assert_same_weights(module, reference)


def test_one_module_in_two_trainers():
    module, reference = Line(), Line()
    fit(module, loader(8))
    fit(module, loader(8), devices=2)
    fit(reference, loader(8), accelerator="cpu")
    fit(reference, loader(16), accelerator="cpu")
    assert_same_weights(module, reference)


class Fails(Line):
    """Raises in one of its methods."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def training_step(self, batch, batch_idx):
        assert self.where != "step", "as asked"
        return self.loss(batch)

    def on_train_batch_end(self, *args):
        assert self.where != "hook", "as asked"

    def validation_step(self, batch, batch_idx):
        assert self.where != "validation", "as asked"

    def configure_optimizers(self):
        assert self.where != "setup", "as asked"
        return super().configure_optimizers()


@pytest.mark.parametrize("where", ["step", "hook", "setup", "validation"])
def test_an_exception_leaves_everything_as_it_was(where):
    module = Fails(where)
    run = trainer(accumulate_grad_batches=2)
    with pytest.raises(AssertionError, match="as asked"):
        run.fit(module, loader(8), loader(8))
    assert run.accumulate_grad_batches == 2
    assert "_prepare_dataloader" not in vars(run._data_connector)
    assert not {"optimizer_zero_grad", "log"} & set(vars(module))
    assert type(module) is Fails
    assert not any(model.isCompiled() for model in run.strategy.poptorch_models.values())
    module.where = "nowhere"
    module.train()
    fit(module, loader(8), loader(8))


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_an_exception_in_an_evaluation_leaves_a_module_that_trains(function):
    class Breaks(Line):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError

        test_step = predict_step = validation_step

    module = Breaks()
    with pytest.raises(ZeroDivisionError):
        getattr(trainer(), function)(module, loader(8))
    assert type(module) is Breaks
    assert "log" not in vars(module)
    fit(module.train(), loader(8))


def test_an_interrupt_ends_a_run_like_an_exception():
    class Interrupts(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                raise KeyboardInterrupt

    module = Line()
    run = trainer(callbacks=[Interrupts()], accumulate_grad_batches=2)
    with pytest.raises(SystemExit):
        run.fit(module, loader(4))
    assert run.interrupted
    assert run.accumulate_grad_batches == 2
    assert "optimizer_zero_grad" not in vars(module)
    fit(module, loader(8))


def test_errors_of_the_compiler_arrive_unchanged():
    class Numpy(Line):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * float(batch[0].numpy().sum())

    with pytest.raises(poptorch.Error):
        fit(Numpy(), loader(8))


def test_flags_of_the_host_do_not_disturb(tmp_path):
    try:
        run = fit(
            Line(),
            loader(8),
            loader(8),
            detect_anomaly=True,
            deterministic=True,
            profiler=pl.profilers.SimpleProfiler(dirpath=tmp_path, filename="p"),
            barebones=False,
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert "[Strategy]IPUStrategy.training_step" in run.profiler.recorded_durations


@pytest.mark.filterwarnings("ignore:.*barebones")
def test_barebones():
    run = pl.Trainer(accelerator="ipu", devices=1, barebones=True, max_epochs=1)
    run.fit(Logs(), loader(8))
    assert run.global_step == 8
    assert run.callback_metrics == {}


def test_a_compiled_module_is_lightnings_error():
    with pytest.raises(RuntimeError, match="IPUStrategy"):
        fit(torch.compile(Line()))


def test_overfit_reload_and_limits():
    module = Line()
    run = fit(module, loader(8, shuffle=False), loader(8), overfit_batches=2, max_epochs=2)
    assert run.global_step == 4
    run = fit(module, loader(8), loader(8), reload_dataloaders_every_n_epochs=1, max_epochs=2, limit_val_batches=1)
    assert run.global_step == 16
    run = fit(module, loader(8), max_steps=3, max_epochs=-1)
    assert run.global_step == 3
