"""What a Trainer or a module asks for that a compiled step cannot do: refused or warned about before anything runs."""

from __future__ import annotations

from typing import Any

import torch

import poptorch
from poptorch.lightning.options import Clipping
from poptorch.lightning.packages import Lightning


def accumulation_of(package: Lightning, trainer: Any) -> int:
    """How many micro-batches make one update, from the Trainer or from a scheduler that never changes it."""
    schedulers = [c for c in trainer.callbacks if isinstance(c, package.GradientAccumulationScheduler)]
    if not schedulers:
        return trainer.accumulate_grad_batches
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            "You have set `accumulate_grad_batches` and are using the `GradientAccumulationScheduler` callback. Either "
            "remove `accumulate_grad_batches` from the Trainer or remove the callback."
        )
    factors = {factor for scheduler in schedulers for factor in scheduler.scheduling.values()}
    if len(factors) > 1:
        raise package.MisconfigurationException(
            "IPUs do not support different `accumulate_grad_batches` at different epochs: it is part of the compiled "
            "step."
        )
    return factors.pop()


def check_module(package: Lightning, module: Any) -> None:
    """Refuse what a step that is one program cannot do."""
    fail = package.MisconfigurationException
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        if package.takes(getattr(module, name), "dataloader_iter", explicit=True):
            raise fail(f"`{name}(self, dataloader_iter)` is not supported on IPUs: let the Trainer fetch the batches.")


def check_optimisation(package: Lightning, module: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    """Refuse ways to train that are not one optimiser after one loss."""
    fail = package.MisconfigurationException
    if len(optimizers) > 1:
        raise fail("IPUs currently only support one optimizer.")
    if not module.automatic_optimization:
        raise fail(
            "IPUs do not support manual optimization (`automatic_optimization=False`): the compiled step computes the "
            "gradients and updates the weights."
        )
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise fail("IPUs and the LBFGS optimizer are not compatible: it runs the step several times for one update.")
    if package.is_overridden("configure_gradient_clipping", module):
        raise fail(
            "`LightningModule.configure_gradient_clipping` is overridden, but on IPUs the compiled step clips: use "
            "`Trainer(gradient_clip_val=..., gradient_clip_algorithm=...)`."
        )
    for hook in ("backward", "optimizer_zero_grad"):
        if package.is_overridden(hook, module):
            package.warn(
                f"You have overridden the `LightningModule.{hook}` hook but it will be ignored: the compiled step does "
                "this on the IPUs."
            )


def check_clipping(package: Lightning, clipping: Clipping, options: poptorch.Options, optimizer: Any) -> None:
    """Refuse a second limit for the gradients that contradicts that of the Trainer."""
    if not clipping:
        return
    limits = {"`max_grad_norm` of the optimizer": getattr(optimizer, "max_grad_norm", None)}
    for key in ("clip_grad_norm", "clip_grad_value"):
        limits[f"`{key}` of the training options"] = options.Training(key) if options.Training.exists(key) else None
    for name, limit in limits.items():
        number = limit[0] if isinstance(limit, tuple) else limit
        if number is not None and number != clipping.value and number != float("inf"):
            raise package.MisconfigurationException(
                f"`Trainer(gradient_clip_val={clipping.value})` contradicts {name}, which is {number}: choose one."
            )


def warn_about_contradictions(package: Lightning, options: poptorch.Options, devices: int | None, count: int) -> None:
    """Say which arguments of the Trainer do not count beside the user's options: `devices=` and the accumulation."""
    replicas, accumulation = options.replication_factor, options.Training.gradient_accumulation
    if devices not in (None, replicas):
        package.warn(
            f"`Trainer(devices={devices})` is ignored: the training options say replicationFactor({replicas})."
        )
    if count not in (1, accumulation):
        package.warn(
            f"`Trainer(accumulate_grad_batches={count})` is ignored: the training options say "
            f"Training.gradientAccumulation({accumulation})."
        )
