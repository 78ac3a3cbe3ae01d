"""Options that only matter for training."""

from __future__ import annotations

from typing_extensions import Self

from poptorch.enums import MeanReductionStrategy, ReductionType
from poptorch.errors import OptionValueError
from poptorch.options.checks import at_least_one, member, positive, truth
from poptorch.options.group import OptionGroup, Stored, option
from poptorch.options.popart import PopartOptions


class TrainingOptions(OptionGroup):
    """Options that only matter for training."""

    def __init__(self, popart: PopartOptions) -> None:
        super().__init__()
        vars(self)["_popart"] = popart

    @option(gradient_accumulation=Stored(int, 1, least=1))
    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """Add up the gradients of this many micro-batches before each weight update."""
        return self._store(gradient_accumulation=at_least_one("gradientAccumulation", gradient_accumulation))

    @option(accumulation_and_replication_reduction_type=ReductionType.Mean)
    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Give the optimiser the mean or the sum of the micro-batch gradients of one update."""
        allowed = (ReductionType.Mean, ReductionType.Sum)
        if not any(reduction_type is choice for choice in allowed):
            raise OptionValueError(
                f"the reduction type is ReductionType.Mean or ReductionType.Sum, not {reduction_type!r}"
            )
        return self._store(accumulation_and_replication_reduction_type=reduction_type)

    accumulationReductionType = accumulationAndReplicationReductionType  # its name before PopTorch 2.2

    @option(meanAccumulationAndReplicationReductionStrategy=MeanReductionStrategy.Post)
    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_accumulation_and_replication_reduction_strategy: MeanReductionStrategy
    ) -> Self:
        """Divide a mean of gradients while it accumulates (`Running`) or once at the end (`Post`)."""
        name = "setMeanAccumulationAndReplicationReductionStrategy"
        strategy = member(name, mean_accumulation_and_replication_reduction_strategy, MeanReductionStrategy)
        return self._store(meanAccumulationAndReplicationReductionStrategy=strategy)

    @option(popart=("automaticLossScalingSettings.enabled",))
    def setAutomaticLossScaling(self, enabled: bool) -> Self:
        """Adapt the loss scale during training, so that float16 gradients neither vanish nor overflow."""
        self._popart.set("automaticLossScalingSettings.enabled", enabled)
        return self

    @option(clip_grad_norm=Stored(tuple))
    def clipGradNorm(self, max_norm: float, norm_type: float = 2.0) -> Self:
        """Limit the common norm of all gradients before each update, as `torch.nn.utils.clip_grad_norm_` does."""
        return self._store(clip_grad_norm=(positive("max_norm", max_norm), positive("norm_type", norm_type)))

    @option(clip_grad_value=Stored(float))
    def clipGradValue(self, clip_value: float) -> Self:
        """Limit every element of the gradients before each update, as `torch.nn.utils.clip_grad_value_` does."""
        return self._store(clip_grad_value=positive("clip_value", clip_value))

    @option(popart=("convolutionOptions",))
    def setConvolutionDithering(self, enabled: bool) -> Self:
        """Start each convolution on another tile, to use memory evenly; replaces `convolutionOptions`."""
        self._popart.set(
            "convolutionOptions",
            {"enableConvDithering": "true" if truth("setConvolutionDithering", enabled) else "false"},
        )
        return self
