"""PopTorch: train and run PyTorch models as ahead-of-time compiled programs on emulated IPUs."""

from poptorch import _logging, autocasting, faults, late_imports, optim, profiling
from poptorch._logging import logger, setLogLevel
from poptorch._version import __version__
from poptorch.annotations import Attribute, autocast, identity_loss, isRunningOnIpu
from poptorch.data import AsynchronousDataAccessor, DataLoader
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
from poptorch.errors import ConfigFileError, Error, RecoverableError, UnrecoverableError, createPoptorchError
from poptorch.ipu import ipuHardwareIsAvailable, ipuHardwareVersion
from poptorch.model import (
    PoplarExecutor,
    importPoptorchMetadataFromFile,
    inferenceModel,
    load,
    module_repr,
    print,
    registerGeometricCustomArgParsers,
    registerPostCompileHook,
    registerPreCompileHook,
    trainingModel,
)
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
from poptorch.structure import ICustomArgParser, registerCustomArgParser

_logging.configure()
faults.configure()
late_imports.configure()

__all__ = [
    "__version__",
    "AnchorMode",
    "AsynchronousDataAccessor",
    "Attribute",
    "AutoStage",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
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
    "autocast",
    "autocasting",
    "createPoptorchError",
    "identity_loss",
    "importPoptorchMetadataFromFile",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "isRunningOnIpu",
    "load",
    "logger",
    "module_repr",
    "optim",
    "print",
    "profiling",
    "registerCustomArgParser",
    "registerGeometricCustomArgParsers",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "setLogLevel",
    "trainingModel",
]
