"""What happens to an optimiser during a run: its schedulers, its numbers and limits, and the hooks around it."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

import poptorch
from lightning_runs import Line, Logs, adam, assert_same_weights, fit, fit_both, loader, pl, sgd, trainer


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


def several(module):
    """One scheduler for every third step, with a name, and one for epochs."""
    optimizer = sgd(module, momentum=0.9)
    fast = {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step", "frequency": 3, "name": "fast"}
    return [optimizer], [fast, lr_scheduler.StepLR(optimizer, 1, 0.5)]


def cyclic(module):
    """Changes the momentum too."""
    optimizer = sgd(module, momentum=0.9)
    cycle = lr_scheduler.CyclicLR(optimizer, 0.001, 0.02, step_size_up=3)
    return [optimizer], [{"scheduler": cycle, "interval": "step"}]


def warm_up_then_cosine(module):
    optimizer = adam(module)
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
    joined = lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": joined, "interval": "step"}}


def bare(module):
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)}


def plateau_of_steps(module):
    optimizer = sgd(module)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "t", "interval": "step"}}


class StepsItself(Logs):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        self.stepped = True

    def configure_optimizers(self):
        return bare(self)


@pytest.mark.parametrize(
    "make",
    [several, cyclic, warm_up_then_cosine, bare, plateau_of_steps, StepsItself],
    ids=lambda make: make.__name__,
)
def test_every_form_of_scheduler_acts_as_on_the_cpu(make):
    kind = make if make is StepsItself else lambda: Logs(make)
    (ours, ipu), (theirs, host) = fit_both(kind, batch_size=8, max_epochs=3)
    assert_same_weights(ours, theirs)
    assert ipu.optimizers[0].param_groups[0]["lr"] == pytest.approx(host.optimizers[0].param_groups[0]["lr"])
    assert make is not StepsItself or ours.stepped


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


def test_subclasses_of_optimisers_and_factories_are_accepted():
    class Mine(torch.optim.Adam):
        pass

    def factory(parameters, **arguments):
        return poptorch.optim.AdamW(parameters, **arguments)

    fit(Line(lambda m: Mine(m.parameters(), lr=0.01)))
    fit(Line(lambda m: factory(m.parameters(), lr=0.01)))
