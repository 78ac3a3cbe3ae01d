"""PopTorch: train and run PyTorch models as ahead-of-time compiled programs on emulated IPUs."""

from poptorch import _logging
from poptorch._logging import logger, setLogLevel
from poptorch._version import __version__
from poptorch.annotations import identity_loss, isRunningOnIpu
from poptorch.enums import (
    AnchorMode,
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from poptorch.errors import ConfigFileError, Error, RecoverableError, UnrecoverableError
from poptorch.ir.structure import ICustomArgParser, registerCustomArgParser
from poptorch.model import PoplarExecutor, inferenceModel, trainingModel
from poptorch.options import (
    Options,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    TensorLocationSettings,
)

_logging.configure()

__all__ = [
    "__version__",
    "AnchorMode",
    "AutoStage",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "identity_loss",
    "inferenceModel",
    "isRunningOnIpu",
    "logger",
    "registerCustomArgParser",
    "setLogLevel",
    "trainingModel",
]
