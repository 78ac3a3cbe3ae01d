"""`Settings`: what the compiler reads instead of `Options`, resolved and immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poptorch.autocasting import Policy
from poptorch.enums import HalfFloatCastingBehavior, MeanReductionStrategy, OutputMode, ReductionType
from poptorch.options.batching import BatchPlan
from poptorch.options.options import Anchor, Options


@dataclass(frozen=True)
class Settings:
    """What the compiler needs to know, resolved and immutable."""

    training: bool
    batching: BatchPlan
    reduction: ReductionType
    strategy: MeanReductionStrategy
    automatic_loss_scaling: bool
    clip_norm: tuple[float, float] | None  # the limit, and the kind of norm
    clip_value: float | None
    half_float_casting: HalfFloatCastingBehavior
    autocasting: Policy | None  # None: switched off
    floating_point_checks: bool
    synthetic_data: int  # one of popart.SyntheticDataMode
    random_seed: int | None
    show_progress: bool
    anchors: Mapping[str, Anchor]
    module_namescope: bool


def resolve(options: Options, *, training: bool) -> Settings:
    """Turn options into settings for one kind of model; the output mode `Default` becomes the real one."""
    mode: OutputMode = options.output_mode
    if mode is OutputMode.Default:
        mode = OutputMode.Final if training else OutputMode.All
    training_options, popart = options.Training, options._Popart.options  # pyright: ignore[reportPrivateUsage]
    return Settings(
        training=training,
        batching=BatchPlan(
            device_iterations=options.device_iterations,
            gradient_accumulation=options.Training.gradient_accumulation if training else 1,
            replicas=options.replication_factor,
            output_mode=mode,
            output_period=options.output_return_period,
            input_group_size=options.input_group_size,
            input_group_type=options.input_cgt,
        ),
        reduction=training_options.accumulation_and_replication_reduction_type,
        strategy=training_options.meanAccumulationAndReplicationReductionStrategy,
        automatic_loss_scaling=bool(popart.get("automaticLossScalingSettings.enabled")),
        clip_norm=training_options.clip_grad_norm if training_options.exists("clip_grad_norm") else None,
        clip_value=training_options.clip_grad_value if training_options.exists("clip_grad_value") else None,
        half_float_casting=options.Precision.half_float_casting,
        autocasting=options.Precision.autocast_policy if options.Precision.autocast_enabled else None,
        floating_point_checks=popart.get("enableFloatingPointChecks") is True,
        synthetic_data=popart.get("syntheticDataMode", 0),
        random_seed=options.random_seed if options.exists("random_seed") else None,
        show_progress=options.show_compilation_progress_bar,
        anchors=options.anchored_tensors,
        module_namescope=options.module_namescope,
    )
