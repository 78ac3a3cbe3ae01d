"""The enumerations that programs name when they call `poptorch.Options()._Popart.set`; nothing else of PopART.

>>> import popart, poptorch
>>> options = poptorch.Options()
>>> settings = options._Popart.set("autoRecomputation", int(popart.RecomputationType.Pipeline))
"""

from enum import IntEnum

__all__ = [
    "AccumulateOuterFragmentSchedule",
    "AutodiffStitchStrategy",
    "BatchSerializationBatchSchedule",
    "BatchSerializationMethod",
    "BatchSerializationTransformContext",
    "GradientTensorTrackingMethod",
    "Instrumentation",
    "MeanReductionStrategy",
    "MergeVarUpdateType",
    "RecomputationType",
    "ReductionType",
    "SubgraphCopyingStrategy",
    "SyntheticDataMode",
    "VirtualGraphMode",
]


class AccumulateOuterFragmentSchedule(IntEnum):
    """The order of the work that is done once per weight update."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class AutodiffStitchStrategy(IntEnum):
    """How a backward graph gets values that only the forward graph has."""

    RecomputeMinimal = 0
    RecomputeAllNonInputs = 1
    AddFwdOutputs = 2
    SafeAddFwdOutputs = 3


class BatchSerializationBatchSchedule(IntEnum):
    """The order of the slices of a serialised batch."""

    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class BatchSerializationMethod(IntEnum):
    """How a batch is cut into slices."""

    UnrollDynamic = 0
    UnrollStatic = 1
    Loop = 2


class BatchSerializationTransformContext(IntEnum):
    """Which passes are serialised: forward, or forward and backward."""

    Fwd = 0
    Bwd = 1


class GradientTensorTrackingMethod(IntEnum):
    """Which gradients automatic loss scaling watches."""

    AllNonViewChangingGradientTensors = 0
    ConvAndMatmulGradients = 1
    GradientsOfUserSpecifiedTensors = 2


class Instrumentation(IntEnum):
    """What is measured on the device."""

    Outer = 0
    Inner = 1


class MeanReductionStrategy(IntEnum):
    """When a mean of gradients is divided."""

    Running = 0
    Post = 1


class MergeVarUpdateType(IntEnum):
    """Which weight updates are merged."""

    Off = 0
    All = 1
    AutoLoose = 2
    AutoTight = 3


class RecomputationType(IntEnum):
    """Which activations are computed again in the backward pass instead of being kept."""

    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class ReductionType(IntEnum):
    """How elements are combined."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class SubgraphCopyingStrategy(IntEnum):
    """When the inputs and outputs of a repeated part of the graph are copied."""

    OnEnterAndExit = 0
    JustInTime = 1


class SyntheticDataMode(IntEnum):
    """What replaces the data of the host."""

    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class VirtualGraphMode(IntEnum):
    """How operations are placed on IPUs."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3
