"""The options that a Trainer stands for, and those that the user gives."""

from __future__ import annotations

import pytest
import torch

import poptorch
from lightning_runs import Line, fit, loader, pl, trainer
from poptorch.lightning import IPUStrategy

Stage = pl.trainer.states.RunningStage


def batching(options):
    return options.Training.gradient_accumulation, options.device_iterations, options.replication_factor


def test_defaults():
    run = fit(Line(), loader(), loader())
    assert batching(run.strategy.training_opts) == batching(run.strategy.inference_opts) == (1, 1, 1)
    assert run.strategy.training_opts.output_mode is poptorch.OutputMode.All
    assert run.strategy.training_opts.auto_round_num_ipus


class Watcher(pl.Callback):
    """Notes what the Trainer says at each batch."""

    def __init__(self):
        self.accumulation, self.replicas = [], {}

    def on_train_batch_end(self, trainer, *args):
        self.accumulation.append(trainer.accumulate_grad_batches)
        self.replicas["train"] = trainer.strategy.replication_factor

    def on_validation_batch_end(self, trainer, *args):
        self.replicas["validate"] = trainer.strategy.replication_factor


def test_accumulation_is_done_by_the_program():
    watcher = Watcher()
    run = fit(Line(), loader(), loader(), accumulate_grad_batches=2, callbacks=[watcher])
    training, validating = run.strategy.poptorch_models[Stage.TRAINING], run.strategy.poptorch_models[Stage.VALIDATING]
    assert training.options.Training.toDict()["gradient_accumulation"] == 2
    assert validating.options.Training.toDict()["gradient_accumulation"] == 1
    assert set(watcher.accumulation) == {1}
    assert run.accumulate_grad_batches == 2
    assert run.global_step == 32


@pytest.mark.filterwarnings("default:`Trainer")
def test_options_of_the_user_are_used_as_they_are():
    training, inference = poptorch.Options(), poptorch.Options()
    strategy = IPUStrategy(training_opts=training, inference_opts=inference)
    with pytest.warns(UserWarning, match=r"devices=2.* is ignored: .*replicationFactor\(1\)"):
        run = fit(Line(), loader(), loader(), strategy=strategy, devices=2)
    assert run.strategy.training_opts is training
    assert run.strategy.inference_opts is inference
    assert run.train_dataloader.options is training
    assert run.global_step == 64


def test_a_contradicting_accumulation_is_warned_about():
    with pytest.warns(UserWarning, match=r"accumulate_grad_batches=4.* is ignored"):
        fit(Line(), strategy=IPUStrategy(training_opts=poptorch.Options()), accumulate_grad_batches=4)


def test_loaders_carry_the_options_of_the_user():
    training = poptorch.Options().deviceIterations(8).replicationFactor(2)
    training.Training.gradientAccumulation(2)
    inference = poptorch.Options().deviceIterations(16)
    strategy = IPUStrategy(training_opts=training, inference_opts=inference)
    assert strategy.replication_factor == 2
    run = trainer(strategy=strategy, accelerator="auto", devices="auto")
    run.fit(Line(), loader(), loader())
    assert run.train_dataloader.options is training
    assert run.val_dataloaders.options is inference
    assert run.strategy.micro_batches_per_step(Stage.TRAINING) == 32
    assert run.strategy.micro_batches_per_step(Stage.VALIDATING) == 16
    assert run.strategy.updates_per_step == 8


def test_the_replication_factor_follows_the_stage():
    watcher = Watcher()
    strategy = IPUStrategy(
        training_opts=poptorch.Options().replicationFactor(8), inference_opts=poptorch.Options().replicationFactor(7)
    )
    assert strategy.replication_factor == 8
    trainer(strategy=strategy, accelerator="auto", devices="auto", callbacks=[watcher]).fit(Line(), loader(), loader())
    assert watcher.replicas == {"train": 8, "validate": 7}


class Keys(pl.Callback):
    """The stages that have an executor when a run starts."""

    def on_fit_start(self, trainer, module):
        self.found = list(trainer.strategy.poptorch_models)

    on_validation_start = on_test_start = on_predict_start = on_fit_start


@pytest.mark.parametrize(
    ("arguments", "validation", "stages"),
    [
        ({}, True, [Stage.TRAINING, Stage.VALIDATING, Stage.SANITY_CHECKING]),
        ({"num_sanity_val_steps": 0}, True, [Stage.TRAINING, Stage.VALIDATING]),
        ({}, False, [Stage.TRAINING]),
        ({"limit_val_batches": 0}, True, [Stage.TRAINING]),
    ],
)
def test_executors_of_a_fit(arguments, validation, stages):
    class First(pl.Callback):
        def on_fit_start(self, trainer, module):
            self.models = dict(trainer.strategy.poptorch_models)

    first = First()
    fit(Line(), loader(), loader() if validation else None, callbacks=[first], limit_train_batches=1, **arguments)
    assert list(first.models) == stages
    if Stage.SANITY_CHECKING in stages:
        assert first.models[Stage.SANITY_CHECKING] is first.models[Stage.VALIDATING]


@pytest.mark.parametrize(
    ("function", "stage"), [("validate", Stage.VALIDATING), ("test", Stage.TESTING), ("predict", Stage.PREDICTING)]
)
def test_executors_of_an_evaluation(function, stage):
    keys = Keys()
    getattr(trainer(callbacks=[keys], fast_dev_run=True), function)(Line(), loader())
    assert keys.found == [stage]


def test_the_seed_is_that_of_the_program_and_the_host_is_not_disturbed():
    def numbers(accelerator):
        pl.seed_everything(1, verbose=False)
        drawn = []

        class Draw(pl.Callback):
            def on_train_batch_end(self, *args):
                drawn.append(torch.rand(()).item())

        run = fit(Line(), loader(8, shuffle=True), loader(8), accelerator=accelerator, callbacks=[Draw()], max_epochs=2)
        return run, drawn

    run, ours = numbers("ipu")
    assert run.strategy.training_opts.random_seed == run.strategy.inference_opts.random_seed == 1
    assert ours == numbers("cpu")[1]


def test_created_options_are_new_in_every_run():
    strategy = IPUStrategy()
    run = trainer(strategy=strategy)
    run.fit(Line(), loader())
    first = strategy.training_opts
    run.fit_loop.max_epochs = 2
    run.fit(Line(), loader())
    assert strategy.training_opts is not first


def test_rounding_can_be_switched_off():
    run = fit(Line(), strategy=IPUStrategy(autoround_num_ipus=False))
    assert not run.strategy.training_opts.auto_round_num_ipus
