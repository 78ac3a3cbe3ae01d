"""The public enumerations; their integer values are part of the API."""

from __future__ import annotations

from enum import Enum, IntEnum


class OutputMode(IntEnum):
    """Which micro-batches of a call hand their outputs back."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


AnchorMode = OutputMode  # its name before PopTorch 2.4


class ReductionType(IntEnum):
    """How the gradients of the micro-batches of one update, or the elements of a loss, are combined."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(IntEnum):
    """When a mean of gradients is divided: while it accumulates, or once at the end."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class ConnectionType(IntEnum):
    """When a model takes its device: as soon as it compiles, when it first runs, or never (compile only)."""

    Always = 0
    OnDemand = 1
    Never = 2


class SyncPattern(IntEnum):
    """Which IPUs wait for each other."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class CommGroupType(IntEnum):
    """How replicas form groups: all together, neighbours, one out of every group's worth, or each alone."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(IntEnum):
    """Which replicas hand back a weight that differs between groups."""

    OnePerGroup = 0
    AllReplicas = 2


class AutoStage(IntEnum):
    """How blocks become pipeline stages if the strategy does not list them."""

    SameAsIpu = 0
    AutoIncrement = 1


class Liveness(IntEnum):
    """When the tensors of a phase leave the IPU in phased execution."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class HalfFloatCastingBehavior(IntEnum):
    """The type of an operation whose operands are float16 and float32."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class DataLoaderMode(IntEnum):
    """Where batches are assembled: in the caller's process, or ahead of time in another."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(IntEnum):
    """How an asynchronous loader hands its data set to its worker."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class MultiConvPlanType(IntEnum):
    """Whether the convolutions of a MultiConv run side by side or one after another."""

    Parallel = 0
    Serial = 1


class MultiConvPartialsType(IntEnum):
    """The type in which the convolutions of a MultiConv keep sums; a name of PopTorch before 2.0 for torch types."""

    Float = 0
    Half = 1


class OverlapMode(Enum):
    """How far the transfer of an input or output may overlap with computation."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class MatMulSerializationMode(Enum):
    """The dimension along which a matrix multiplication is cut into smaller ones."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"
