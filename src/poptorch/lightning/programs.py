"""The programs of one run: which there are, which of them has the IPUs, and what each must know before a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import poptorch
from poptorch.lightning.checks import check_clipping
from poptorch.lightning.loaders import short_shapes
from poptorch.lightning.module import LightningIPUModule
from poptorch.lightning.options import Clipping, forward_only, one_micro_batch, training_options
from poptorch.lightning.packages import Lightning
from poptorch.lightning.steps import Counts, Step
from poptorch.lightning.watch import HostWatch, numbers_of


@dataclass(frozen=True)
class RunPlan:
    """What a strategy has decided before its programs are made."""

    training: poptorch.Options
    inference: poptorch.Options
    combines: bool  # whether results are averaged over micro-batches
    may_scale_loss: bool  # whether the loss is scaled automatically, unless the optimiser has a scale
    default_dtype: torch.dtype | None  # of tensors that steps make, if it is not torch's


class Programs:
    """Steps by stage and loader, made when they are first needed; `models` has the executors that users may see."""

    def __init__(self, package: Lightning, wrapper: LightningIPUModule, trainer: Any, plan: RunPlan) -> None:
        self.models: dict[Any, poptorch.PoplarExecutor] = {}
        self._package, self._wrapper, self._trainer, self._plan = package, wrapper, trainer, plan
        self._steps: dict[tuple[Any, ...], Step] = {}
        self._active: Step | None = None
        self._watch = HostWatch(wrapper.lightning_module, trainer)
        self._seen: dict[int, list[int]] = {}  # step → versions of the tensors that it last ran with
        self._trains = False  # whether there is an optimiser
        self._trained: tuple[Any, ...] = ()  # what the training program was made for
        self._numbers: list[Any] = []  # of the optimiser, as the training program has them

    # ---- which there are

    def prepare_training(self) -> None:
        """Make the executor that trains; like all of them it compiles at its first call."""
        stage = self._package.RunningStage.TRAINING
        step = self._steps[(stage,)] = self._new_training_step()
        self.models[stage] = step.executor

    def prepare_evaluation(self, stage: Any) -> None:
        """Make the executor of a stage; the sanity check shares that of the validation."""
        self.models[stage] = self._evaluation_step(stage, 0).executor

    def _new_training_step(self) -> Step:
        (optimizer,) = self._trainer.optimizers or [None]
        clipping = self._watch.clipping()
        check_clipping(self._package, clipping, self._plan.training, optimizer)
        self._trains = optimizer is not None and not isinstance(optimizer, self._package.MockOptimizer)
        if optimizer is None or not self._trains:
            return self._new_forward_only_step()
        scales_loss = self._plan.may_scale_loss and getattr(optimizer, "loss_scaling", 1.0) == 1.0
        options = training_options(self._plan.training, clipping, scales_loss=scales_loss)
        self._numbers, self._trained = numbers_of(optimizer), self._watch.shape_of_training(optimizer)
        return self._new_step(poptorch.trainingModel(self._wrapper, options, optimizer), training=True)

    def _new_forward_only_step(self) -> Step:
        options = forward_only(training_options(self._plan.training, Clipping(None), scales_loss=False))
        return self._new_step(poptorch.inferenceModel(self._wrapper, options), training=True)

    def _evaluation_step(self, stage: Any, dataloader_idx: int, *, remainder: Any = None) -> Step:
        """The step of a stage and a loader; what is left at the end of the data has its own, by its shapes."""
        stages = self._package.RunningStage
        stage = stages.VALIDATING if stage == stages.SANITY_CHECKING else stage
        key = (stage, dataloader_idx, remainder)
        if key not in self._steps:
            options = self._plan.inference if remainder is None else one_micro_batch(self._plan.inference)
            executor = poptorch.inferenceModel(self._wrapper, options)
            self._steps[key] = self._new_step(executor, training=False, is_predicting=stage == stages.PREDICTING)
        return self._steps[key]

    def _new_step(self, executor: poptorch.PoplarExecutor, *, training: bool, is_predicting: bool = False) -> Step:
        return Step(
            self._package,
            self._wrapper,
            executor,
            training=training,
            combines=self._plan.combines and not is_predicting,
            default_dtype=self._plan.default_dtype,
        )

    # ---- one call

    def train(self, args: tuple[Any, ...]) -> Any:
        """Run the training step on a batch, which updates the weights."""
        counts = self._counts()
        if counts["batch_idx"] == 0:
            self._find_parameters()
        step = self._keep_up(self._steps[(self._package.RunningStage.TRAINING,)])
        self._activate(step)
        return step(args, counts)

    def train_nothing(self, args: tuple[Any, ...]) -> Any:
        """Run the training step without an update, by which callbacks collect statistics of batch normalisation."""
        key = (self._package.RunningStage.TRAINING, "forward only")
        if key not in self._steps:
            self._steps[key] = self._new_forward_only_step()
        step = self._steps[key]
        self._activate(step)
        self._follow_host(step)
        result = step(args, self._counts())
        step.executor.copyWeightsToHostIfNeeded()
        return result

    def evaluate(self, args: tuple[Any, ...]) -> Any:
        """Run the step of the current stage on a batch."""
        dataloader_idx = (*args[2:], 0)[0]
        short = short_shapes(self._trainer._active_loop._combined_loader, args[0], dataloader_idx)
        step = self._evaluation_step(self._trainer.state.stage, dataloader_idx, remainder=short)
        self._activate(step)
        self._follow_host(step)
        result = step(args, self._counts())
        if step.executor.copyWeightsToHostIfNeeded():
            self._seen[id(step)] = self._watch.versions()
        return result

    def _counts(self) -> Counts:
        trainer = self._trainer
        loop = trainer._active_loop
        batch_idx = getattr(loop, "epoch_loop", loop).batch_progress.current.ready - 1  # not every step takes it
        return {"batch_idx": batch_idx, "current_epoch": trainer.current_epoch, "global_step": trainer.global_step}

    # ---- what the host has changed since the last call

    def _find_parameters(self) -> None:
        """Compile everything again if the module has got other parameters, as pruning gives it."""
        before, self._watch = self._watch.names, HostWatch(self._wrapper.lightning_module, self._trainer)
        if self._watch.names != before:
            for step in self._steps.values():
                step.forget()

    def _keep_up(self, step: Step) -> Step:
        """Tell the training program what it must know of the optimiser; gives the step to use."""
        if not self._trains:
            return step
        (optimizer,) = self._trainer.optimizers
        if self._watch.shape_of_training(optimizer) != self._trained:
            step = self._replace_training_step(step)
        numbers = numbers_of(optimizer)
        if numbers != self._numbers:
            self._numbers = numbers
            step.executor.setOptimizer(optimizer)
        return step

    def _replace_training_step(self, step: Step) -> Step:
        """Train with another set of parameters, modes or limits; weights and optimiser state go on as they are."""
        if step.executor.isCompiled():
            self._package.warn(
                "poptorch compiles the training step again: which parameters are trained, the train or eval mode of a "
                "submodule, or the clipping of gradients has changed."
            )
        step.executor.destroy()
        self.prepare_training()
        return self._steps[(self._package.RunningStage.TRAINING,)]

    def _follow_host(self, step: Step) -> None:
        """Take over weights that the host has changed since the last call, as averages swapped in by a callback.

        A change of `parameter.data` leaves no trace, so in each stage the first call looks at all of them.
        """
        versions = self._watch.versions()
        if self._seen.get(id(step)) != versions and step.executor.isAttachedToDevice():
            step.executor.copyWeightsToDevice()
        self._seen[id(step)] = versions

    # ---- who has the IPUs

    def start(self, stage: Any) -> None:
        """A stage begins: its executor takes its IPUs, and with them the weights as they are now."""
        self.detach()
        self._find_parameters()
        self._seen.clear()
        executor = self.models.get(stage)
        if executor is not None and executor.isCompiled():
            executor.attachToDevice()

    def detach(self) -> None:
        """A stage ends: nobody has IPUs."""
        self._activate(None)

    def _activate(self, step: Step | None) -> None:
        """Let one step have its IPUs, and no other."""
        if step is None or self._active is not step:
            for other in self._steps.values():
                if other is not step and other.executor.isAttachedToDevice():
                    other.executor.detachFromDevice()
            self._active = step

    def copy_weights_to_host(self) -> None:
        """Bring what programs have changed to the module; training programs work on the module itself."""
        for step in self._steps.values():
            step.executor.copyWeightsToHostIfNeeded()

    def copy_weights_to_device(self) -> None:
        """Let all compiled programs use the weights that the module has now."""
        for step in self._steps.values():
            if step.executor.isCompiled():
                step.executor.copyWeightsToDevice()

    def destroy(self) -> None:
        """The run is over: the module is a plain module again."""
        for step in self._steps.values():
            step.executor.destroy()
        self._active = None
