"""The programs of a run: who has the IPUs, and what of the host's changes each of them sees."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from lightning_runs import Line, Logs, adam, assert_same_weights, fit, fit_both, loader, pl, trainer

Stage = pl.trainer.states.RunningStage


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


def test_no_weights_are_copied_while_training(caplog):
    with caplog.at_level(logging.DEBUG, "poptorch::python"):
        fit(Line(), limit_train_batches=20)
    assert "Writing weights from IPU" not in caplog.text
    assert "copyWeightsToHost" not in caplog.text


def test_weights_can_be_copied_by_hand():
    class Copies(pl.Callback):
        def on_validation_batch_end(self, trainer, *args):
            trainer.strategy.copy_weights_to_host()
            trainer.strategy.copy_weights_to_device()

    fit(Line(), loader(8), loader(8), callbacks=[Copies()])


@pytest.mark.parametrize("arguments", [{"val_check_interval": 2}, {"num_sanity_val_steps": 3}])
def test_validation_does_not_change_the_training(arguments):
    (ours, ipu), (theirs, host) = fit_both(
        lambda: Line(adam), batch_size=8, validation=loader(8), cpu={}, max_epochs=2, **arguments
    )
    assert_same_weights(ours, theirs)
    torch.testing.assert_close(
        ipu.optimizers[0].state_dict()["state"], host.optimizers[0].state_dict()["state"], rtol=1e-4, atol=1e-5
    )


class Swap(pl.Callback):
    """Validates with weights of zero, as averages of weights are swapped in and out."""

    def on_validation_start(self, trainer, module):
        self.kept = copy.deepcopy(module.state_dict())
        for parameter in module.parameters():
            parameter.data.zero_()

    def on_validation_end(self, trainer, module):
        module.load_state_dict(self.kept)


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


def test_a_parameter_group_that_is_added_later_trains():
    with pytest.warns(UserWarning, match="compiles the training step again"):
        (ours, _), (theirs, _) = fit_both(Extra, batch_size=8, callbacks=[Unfreeze()], max_epochs=3)
    assert_same_weights(ours, theirs)


class EvalPart(Line):
    """Sets a mode before the first batch, which is no reason to compile twice."""

    def on_train_epoch_start(self):
        self.fc.eval()


def test_modes_that_are_set_before_the_first_batch_count():
    module = EvalPart()
    fit(module, loader(8), max_epochs=2)
    assert not module.fc.training


class ClipsLater(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.gradient_clip_val = None if batch_idx < 4 else 0.001


def test_a_limit_that_changes_compiles_again():
    with pytest.warns(UserWarning, match="compiles the training step again"):
        (ours, _), (theirs, _) = fit_both(Line, batch_size=8, callbacks=[ClipsLater()])
    assert_same_weights(ours, theirs)


def test_pruning_gives_the_module_other_parameters():
    found = []
    for accelerator in ("ipu", "cpu"):
        module = Logs()
        pruning = pl.callbacks.ModelPruning("l1_unstructured", [(module.fc, "weight")], amount=0.5)
        run = fit(module, loader(8), loader(8), accelerator=accelerator, callbacks=[pruning], max_epochs=2)
        found.append((module, run.callback_metrics["v"]))
    (ours, mine), (theirs, other) = found
    assert_same_weights(ours, theirs)
    torch.testing.assert_close(mine, other)
    assert (ours.fc.weight == 0).sum() >= 32
