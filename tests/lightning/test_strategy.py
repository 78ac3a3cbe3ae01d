"""The life of a run: optimiser, schedulers, hooks, attaching, checkpoints, and what is left behind."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import poptorch
from lightning_runs import Line, assert_same_weights, fit, fit_both, loader, pl, trainer
from poptorch.lightning import IPUStrategy

MisErr = pl.utilities.exceptions.MisconfigurationException
Stage = pl.trainer.states.RunningStage


def sgd(module, **arguments):
    return torch.optim.SGD(module.parameters(), **{"lr": 0.02, **arguments})


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.01)


# ---- schedulers and numbers of the optimiser


def scheduled(make, **config):
    def configure(module):
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}

    return lambda: Line(configure)


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize(
    "make",
    [lambda o: lr_scheduler.StepLR(o, 2, 0.5), lambda o: lr_scheduler.ExponentialLR(o, 0.9)],
    ids=["step", "exp"],
)
def test_schedulers_act_as_on_the_cpu(make, interval):
    (ours, ipu), (theirs, host) = fit_both(scheduled(make, interval=interval), batch_size=8, max_epochs=3)
    assert_same_weights(ours, theirs)
    assert ipu.optimizers[0].param_groups[0]["lr"] == host.optimizers[0].param_groups[0]["lr"] < 0.02


class Plateau(Line):
    def validation_step(self, batch, batch_idx):
        self.log("v", 1 + 0 * self.loss(batch))


def test_a_plateau_lowers_the_learning_rate():
    def configure(module):
        optimizer = sgd(module)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "v"}}

    (ours, ipu), (theirs, _) = fit_both(lambda: Plateau(configure), batch_size=8, validation=loader(8), max_epochs=4)
    assert_same_weights(ours, theirs)
    assert ipu.optimizers[0].param_groups[0]["lr"] < 0.001


class OneCycle(Line):
    def configure_optimizers(self):
        optimizer = sgd(self, momentum=0.9)
        self.total = self.trainer.estimated_stepping_batches
        cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=self.total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def test_one_cycle_knows_how_many_steps_there_are():
    (ours, ipu), (theirs, _) = fit_both(
        OneCycle, batch_size=2, cpu_batch_size=8, devices=2, accumulate_grad_batches=2, max_epochs=2
    )
    assert ours.total == ipu.global_step == 16
    assert_same_weights(ours, theirs)


class SetsRate(Line):
    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.01 / (1 + batch_idx)


class SetsRateInStep(Line):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + batch_idx)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


@pytest.mark.parametrize("kind", [SetsRate, SetsRateInStep])
def test_a_rate_that_a_hook_sets_counts_in_the_same_batch(kind):
    (ours, _), (theirs, _) = fit_both(kind, batch_size=8)
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize(
    "configure",
    [
        sgd,
        adam,
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    ],
    ids=["SGD", "Adam", "AdamW", "RMSprop"],
)
def test_clipping_equals_the_cpu(configure, algorithm):
    (ours, _), (theirs, _) = fit_both(
        lambda: Line(configure), batch_size=4, gradient_clip_val=0.01, gradient_clip_algorithm=algorithm
    )
    assert_same_weights(ours, theirs, 1e-4)


def test_clipping_comes_after_accumulation_and_replicas():
    (ours, _), (theirs, _) = fit_both(
        Line, batch_size=2, cpu_batch_size=8, devices=2, accumulate_grad_batches=2, gradient_clip_val=0.01
    )
    assert_same_weights(ours, theirs, 1e-4)


@pytest.mark.parametrize(
    ("configure", "options"),
    [
        (lambda m: poptorch.optim.SGD(m.parameters(), lr=0.1, max_grad_norm=1.0), None),
        (sgd, lambda options: options.Training.clipGradNorm(1.0)),
    ],
    ids=["optimiser", "options"],
)
def test_two_limits_contradict_each_other(configure, options):
    arguments = {}
    if options is not None:
        own = poptorch.Options()
        options(own)
        arguments["strategy"] = IPUStrategy(training_opts=own)
    with pytest.raises(MisErr, match="contradicts"):
        fit(Line(configure), gradient_clip_val=0.5, **arguments)


class ClipsLater(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.gradient_clip_val = None if batch_idx < 4 else 0.001


def test_a_limit_that_changes_compiles_again():
    with pytest.warns(UserWarning, match="compiles the training step again"):
        (ours, _), (theirs, _) = fit_both(Line, batch_size=8, callbacks=[ClipsLater()])
    assert_same_weights(ours, theirs)


# ---- what is refused, and what is ignored


class Manual(Line):
    def __init__(self, configure=None):
        super().__init__(configure)
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (lambda: Manual(), "manual optimization"),
        (lambda: Manual(lambda m: [sgd(m), sgd(m)]), "IPUs currently only support one optimizer."),
        (lambda: Line(lambda m: torch.optim.LBFGS(m.parameters())), "not compatible"),
    ],
    ids=["manual", "two optimisers", "LBFGS"],
)
def test_other_ways_to_optimise_are_refused(module, text):
    with pytest.raises(MisErr, match=text):
        fit(module())


class OwnClipping(Line):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        pass


class TakesIterator(Line):
    def training_step(self, dataloader_iter):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "text"), [(OwnClipping, "configure_gradient_clipping"), (TakesIterator, "dataloader_iter")]
)
def test_hooks_that_cannot_work_are_refused(kind, text):
    with pytest.raises(MisErr, match=text):
        fit(kind())


class SkipsUpdates(Line):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()


def test_a_step_without_an_update_is_refused():
    with pytest.raises(MisErr, match="cannot run without updating"):
        fit(SkipsUpdates())


@pytest.mark.parametrize("schedule", [{0: 1, 4: 2}, {4: 2}])
def test_an_accumulation_that_changes_is_refused(schedule):
    scheduler = pl.callbacks.GradientAccumulationScheduler(schedule)
    with pytest.raises(MisErr, match="different `accumulate_grad_batches` at different epochs"):
        fit(Line(), callbacks=[scheduler])


def test_a_constant_schedule_is_an_accumulation():
    (ours, ipu), (theirs, host) = fit_both(
        Line, batch_size=4, callbacks=[pl.callbacks.GradientAccumulationScheduler({0: 2})], max_epochs=2
    )
    assert ipu.strategy.training_opts.Training.gradient_accumulation == 2
    assert ipu.global_step == host.global_step == 16
    assert_same_weights(ours, theirs)


class Hooks(Line):
    """Counts hooks; overrides two that cannot do anything."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def backward(self, loss):
        self.calls.append("backward")

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.calls.append("optimizer_zero_grad")

    def on_before_zero_grad(self, optimizer):
        self.calls.append("on_before_zero_grad")

    def on_before_backward(self, loss):
        self.calls.append("on_before_backward")

    def on_after_backward(self):
        self.calls.append("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        assert self.fc.weight.grad is None
        self.calls.append("on_before_optimizer_step")


def test_hooks_run_once_per_batch():
    module = Hooks()
    with pytest.warns(UserWarning, match="hook but it will be ignored") as caught:
        fit(module, loader(8), limit_train_batches=2)
    for name in ("backward", "optimizer_zero_grad"):
        assert sum(f"`LightningModule.{name}` hook but it will be ignored" in str(w.message) for w in caught) == 1
    order = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
    assert module.calls == order * 2
    assert "optimizer_zero_grad" not in vars(module)


def test_no_weights_are_copied_while_training(caplog):
    with caplog.at_level(logging.DEBUG, "poptorch::python"):
        fit(Line(), limit_train_batches=20)
    assert "Writing weights from IPU" not in caplog.text
    assert "copyWeightsToHost" not in caplog.text


def test_subclasses_of_optimisers_and_factories_are_accepted():
    class Mine(torch.optim.Adam):
        pass

    def factory(parameters, **arguments):
        return poptorch.optim.AdamW(parameters, **arguments)

    fit(Line(lambda m: Mine(m.parameters(), lr=0.01)))
    fit(Line(lambda m: factory(m.parameters(), lr=0.01)))


# ---- attaching


class Attached(pl.Callback):
    """Which executors hold IPUs at the end of a batch."""

    def __init__(self):
        self.seen = set()

    def note(self, trainer, *args):
        models = trainer.strategy.poptorch_models
        self.seen.add((trainer.state.stage, *[s for s, e in models.items() if e.isAttachedToDevice()]))

    on_train_batch_end = on_validation_batch_end = note


def test_one_executor_has_the_ipus_at_a_time():
    attached = Attached()
    run = fit(Line(), loader(8), loader(8), callbacks=[attached], max_epochs=2, val_check_interval=4)
    assert attached.seen == {
        (Stage.SANITY_CHECKING, Stage.VALIDATING, Stage.SANITY_CHECKING),
        (Stage.TRAINING, Stage.TRAINING),
        (Stage.VALIDATING, Stage.VALIDATING, Stage.SANITY_CHECKING),
    }
    assert not any(model.isCompiled() for model in run.strategy.poptorch_models.values())


def test_many_devices_share_the_emulated_ipus():
    run = trainer(devices=40)
    run.fit(Line(), loader(1, 80), loader(1, 100))
    assert run.global_step == 2


class Swap(pl.Callback):
    """Validates with weights of zero, as averages of weights are swapped in and out."""

    def on_validation_start(self, trainer, module):
        self.kept = copy.deepcopy(module.state_dict())
        for parameter in module.parameters():
            parameter.data.zero_()

    def on_validation_end(self, trainer, module):
        module.load_state_dict(self.kept)


class Logs(Line):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("t", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("v", self.loss(batch))


def test_weights_that_a_callback_swaps_in_are_validated():
    (ours, ipu), (theirs, host) = fit_both(
        Logs, batch_size=8, validation=loader(8), callbacks=[Swap()], max_epochs=2, num_sanity_val_steps=1
    )
    assert_same_weights(ours, theirs)
    torch.testing.assert_close(ipu.callback_metrics["v"], host.callback_metrics["v"])


class Edits(pl.Callback):
    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        with torch.no_grad():
            module.fc.weight.fill_(float(batch_idx))


def test_weights_that_a_callback_changes_between_batches_are_validated():
    results = [
        trainer(accelerator, callbacks=[Edits()]).validate(Logs(), loader(8), verbose=False)[0]["v"]
        for accelerator in ("ipu", "cpu")
    ]
    assert results[0] == pytest.approx(results[1])


class Unfreeze(pl.callbacks.BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.extra)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.extra, optimizer, lr=0.01)


class Extra(Line):
    def __init__(self):
        super().__init__(lambda m: torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=0.01))
        self.extra = nn.Linear(32, 32)
        nn.init.eye_(self.extra.weight)

    def forward(self, x):
        return self.fc(self.extra(x))


class EvalPart(Line):
    """Sets a mode before the first batch, which is no reason to compile twice."""

    def on_train_epoch_start(self):
        self.fc.eval()


def test_modes_that_are_set_before_the_first_batch_count():
    module = EvalPart()
    fit(module, loader(8), max_epochs=2)
    assert not module.fc.training


def test_a_parameter_group_that_is_added_later_trains():
    with pytest.warns(UserWarning, match="compiles the training step again"):
        (ours, _), (theirs, _) = fit_both(Extra, batch_size=8, callbacks=[Unfreeze()], max_epochs=3)
    assert_same_weights(ours, theirs)


# ---- checkpoints


def checkpoint(run, path):
    run.save_checkpoint(path)
    return torch.load(path, weights_only=True)


def test_a_checkpoint_has_the_keys_of_a_cpu_run(tmp_path):
    (_, ipu), (_, host) = fit_both(lambda: Logs(adam), batch_size=8)
    ours, theirs = checkpoint(ipu, tmp_path / "ipu.ckpt"), checkpoint(host, tmp_path / "cpu.ckpt")
    assert list(ours) == list(theirs)
    assert list(ours["state_dict"]) == ["fc.weight", "fc.bias"]
    torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours["optimizer_states"], theirs["optimizer_states"], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_checkpoint_loads_without_this_library(tmp_path):
    run = fit(Line(lambda m: poptorch.optim.Adam(m.parameters(), lr=0.01)), loader(8))
    run.save_checkpoint(tmp_path / "x.ckpt")
    code = (
        "import sys; sys.modules['poptorch'] = None; import torch; "
        f"c = torch.load({str(tmp_path / 'x.ckpt')!r}, weights_only=True); print(sorted(c['state_dict']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "['fc.bias', 'fc.weight']\n"


@pytest.mark.parametrize("order", [("ipu", "cpu"), ("cpu", "ipu")])
@pytest.mark.parametrize("own", [False, True], ids=["torch", "poptorch"])
def test_a_run_goes_on_elsewhere(order, own, tmp_path):
    def configure(module, accelerator):
        kind = poptorch.optim.Adam if own and accelerator == "ipu" else torch.optim.Adam
        optimizer = kind(module.parameters(), lr=0.01)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]

    reference = Line(lambda m: configure(m, "cpu"))
    fit(reference, loader(8), accelerator="cpu", max_epochs=2)

    first = fit(Line(lambda m: configure(m, order[0])), loader(8), accelerator=order[0])
    first.save_checkpoint(tmp_path / "half.ckpt")
    module = Line(lambda m: configure(m, order[1]))
    second = trainer(order[1], max_epochs=2)
    second.fit(module, loader(8), ckpt_path=tmp_path / "half.ckpt")
    assert_same_weights(module, reference)
    assert second.global_step == 16


class Saved(Logs):
    def __init__(self, lr=0.01):
        super().__init__()
        self.save_hyperparameters()

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def test_a_loaded_checkpoint_tests_as_the_module_did(tmp_path):
    module = Saved()
    run = fit(module, loader(8))
    run.save_checkpoint(tmp_path / "end.ckpt")
    expected = run.test(module, loader(8), verbose=False)
    loaded = Saved.load_from_checkpoint(tmp_path / "end.ckpt", weights_only=True)
    assert trainer().test(loaded, loader(8), verbose=False) == expected
    moments = torch.load(tmp_path / "end.ckpt", weights_only=True)["optimizer_states"][0]["state"][0]
    assert moments["step"] == 8
    assert moments["exp_avg"].abs().sum() > 0


def test_checkpoints_in_the_middle_of_an_epoch_are_current(tmp_path):
    weights = []

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            weights.append(module.fc.weight.detach().clone())

    files = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(Line(), loader(8), callbacks=[Note(), files], enable_checkpointing=True)
    for step in (3, 6):
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert torch.equal(saved["state_dict"]["fc.weight"], weights[step - 1])


def test_early_stopping_and_the_best_checkpoint(tmp_path):
    class Worse(Line):
        def validation_step(self, batch, batch_idx):
            self.log("v", self.current_epoch + 0 * self.loss(batch))

    best = pl.callbacks.ModelCheckpoint(tmp_path, monitor="v", filename="best")
    module = Worse()
    run = fit(
        module,
        loader(8),
        loader(8),
        callbacks=[pl.callbacks.EarlyStopping("v", patience=1), best],
        enable_checkpointing=True,
        max_epochs=10,
        num_sanity_val_steps=0,
    )
    assert run.current_epoch == 2
    assert torch.load(best.best_model_path, weights_only=True)["epoch"] == 0
    run.test(module, loader(8), ckpt_path="best", verbose=False, weights_only=True)


# ---- life cycle


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

    def configure_optimizers(self):
        assert self.where != "setup", "as asked"
        return super().configure_optimizers()


@pytest.mark.parametrize("where", ["step", "hook", "setup"])
def test_an_exception_leaves_everything_as_it_was(where):
    module = Fails(where)
    run = trainer(accumulate_grad_batches=2)
    with pytest.raises(AssertionError, match="as asked"):
        run.fit(module, loader(8))
    assert run.accumulate_grad_batches == 2
    assert "_prepare_dataloader" not in vars(run._data_connector)
    assert not {"optimizer_zero_grad", "log"} & set(vars(module))
    assert type(module) is Fails
    assert not any(model.isCompiled() for model in run.strategy.poptorch_models.values())
    module.where = "nowhere"
    fit(module, loader(8))


def test_errors_of_the_compiler_arrive_unchanged():
    class Numpy(Line):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * float(batch[0].numpy().sum())

    with pytest.raises(poptorch.Error):
        fit(Numpy(), loader(8))


@pytest.mark.parametrize("arguments", [{"val_check_interval": 2}, {"num_sanity_val_steps": 3}])
def test_validation_does_not_change_the_training(arguments):
    (ours, ipu), (theirs, host) = fit_both(
        lambda: Line(adam), batch_size=8, validation=loader(8), cpu={}, max_epochs=2, **arguments
    )
    assert_same_weights(ours, theirs)
    torch.testing.assert_close(
        ipu.optimizers[0].state_dict()["state"], host.optimizers[0].state_dict()["state"], rtol=1e-4, atol=1e-5
    )


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


def test_weights_can_be_copied_by_hand():
    class Copies(pl.Callback):
        def on_validation_batch_end(self, trainer, *args):
            trainer.strategy.copy_weights_to_host()
            trainer.strategy.copy_weights_to_device()

    fit(Line(), loader(8), loader(8), callbacks=[Copies()])


def test_overfit_reload_and_limits():
    module = Line()
    run = fit(module, loader(8, shuffle=False), loader(8), overfit_batches=2, max_epochs=2)
    assert run.global_step == 4
    run = fit(module, loader(8), loader(8), reload_dataloaders_every_n_epochs=1, max_epochs=2, limit_val_batches=1)
    assert run.global_step == 16
    run = fit(module, loader(8), max_steps=3, max_epochs=-1)
    assert run.global_step == 3


def test_the_model_of_the_strategy_is_the_wrapper():
    module = Line()
    run = fit(module, loader(8))
    assert isinstance(run.strategy.model, poptorch.lightning.LightningIPUModule)
    assert list(run.strategy.model.parameters()) == list(module.parameters())
    assert run.lightning_module is module


class WithNorm(Logs):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        return self.fc(self.norm(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: pl.callbacks.EMAWeightAveraging(decay=0.5),
        lambda: pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1),
    ],
    ids=["EMA", "SWA"],
)
@pytest.mark.filterwarnings("ignore:poptorch compiles a step of WithNorm again. self.norm.momentum")
def test_averages_of_weights_equal_the_cpu(make):
    runs = []
    for accelerator in ("ipu", "cpu"):
        module = WithNorm()
        run = fit(module, loader(8), loader(8), accelerator=accelerator, callbacks=[make()], max_epochs=4)
        runs.append((module, run))
    (ours, ipu), (theirs, host) = runs
    assert_same_weights(ours, theirs)
    torch.testing.assert_close(ipu.callback_metrics["v"], host.callback_metrics["v"])
    assert ipu.global_step == host.global_step


def test_finding_a_learning_rate():
    def losses(accelerator):
        module = Line(lambda m: torch.optim.SGD(m.parameters(), lr=m.lr))
        module.lr = 0.01
        tuner = pl.tuner.Tuner(trainer(accelerator))
        found = tuner.lr_find(module, loader(8), num_training=5, update_attr=False)
        return found.results["loss"]

    assert losses("ipu") == pytest.approx(losses("cpu"))


def test_schedulers_cause_no_remarks_about_attributes(caplog):
    fit(scheduled(lambda o: lr_scheduler.StepLR(o, 1), interval="step")(), loader(8))
    assert "unexpected" not in caplog.text
