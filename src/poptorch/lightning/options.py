"""The options of executors and loaders that the arguments of a Trainer stand for."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

import popdist
import popdist.poptorch
import poptorch


@dataclass(frozen=True)
class Clipping:
    """`gradient_clip_val` and `gradient_clip_algorithm` of a Trainer; a value of None or 0 means none."""

    value: float | None
    algorithm: str = "norm"

    def __bool__(self) -> bool:
        return bool(self.value) and float(self.value or 0) > 0

    def apply(self, options: poptorch.Options) -> None:
        """Let the program clip."""
        if self and self.algorithm == "value":
            options.Training.clipGradValue(float(self.value or 0))
        elif self:
            options.Training.clipGradNorm(float(self.value or 0))


def created_options(*, device_iterations: int, replicas: int, accumulation: int, auto_round: bool) -> poptorch.Options:
    """Options for a user who gave none; started by `poprun`, a process has the replicas that it was started for."""
    if popdist.isPopdistEnvSet():
        options: poptorch.Options = popdist.poptorch.Options()
    else:
        options = poptorch.Options().replicationFactor(replicas)
    options.deviceIterations(device_iterations).outputMode(poptorch.OutputMode.All).autoRoundNumIPUs(auto_round)
    options.allowShapeChanges(True)  # as on the CPU: steps with several ways or shapes have several programs
    options.Training.gradientAccumulation(accumulation)
    seed = os.environ.get("PL_GLOBAL_SEED")
    if seed is not None:
        state = torch.get_rng_state()
        options.randomSeed(int(seed))  # this also seeds the host, whose numbers must be those of a run on the CPU
        torch.set_rng_state(state)
    return options


def training_options(options: poptorch.Options, clipping: Clipping, *, scales_loss: bool) -> poptorch.Options:
    """The options of the training executor: all results, clipping, and loss scaling for half precision.

    Schedulers add attributes to an optimiser whenever they are set up, so the executor need not mention them.
    """
    own = options.clone().relaxOptimizerAttributesChecks(True)
    if own.defaultOutputMode():
        own.outputMode(poptorch.OutputMode.All)
    clipping.apply(own)
    if scales_loss:
        own.Training.setAutomaticLossScaling(True)
    return own


def forward_only(options: poptorch.Options) -> poptorch.Options:
    """Options of an executor that takes the same batches as a training executor, but trains nothing."""
    own = options.clone()
    iterations = own.device_iterations * own.Training.gradient_accumulation
    own.Training.gradientAccumulation(1)
    return own.deviceIterations(iterations)


def one_micro_batch(options: poptorch.Options) -> poptorch.Options:
    """Options of an executor that takes what is left at the end of a data set."""
    own = options.clone()
    own.set(device_iterations=1, replication_factor=1, input_group_size=1)  # popdist's options refuse the methods
    return own
