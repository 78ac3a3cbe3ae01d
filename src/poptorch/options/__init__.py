"""The fluent `Options` with all its groups, and the frozen `Settings` it turns into."""

from poptorch.errors import ConfigFileError
from poptorch.options.batching import BatchPlan
from poptorch.options.data import options_data, options_from
from poptorch.options.distributed import DistributedOptions, place_of_data
from poptorch.options.jit import JitOptions
from poptorch.options.locations import TensorLocationOptions, TensorLocationSettings
from poptorch.options.options import Anchor, Options
from poptorch.options.placing import Mode, StagePlan, StrategyPlan
from poptorch.options.popart import PopartOptions
from poptorch.options.precision import PrecisionOptions
from poptorch.options.reference import reference
from poptorch.options.settings import PlacementSettings, ProcessSettings, Settings, resolve
from poptorch.options.strategies import (
    ExecutionStrategy,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from poptorch.options.training import TrainingOptions
from poptorch.options.validation import validate

# The names under which PopTorch's documentation and programs know the groups.
_DistributedOptions = DistributedOptions
_GraphProcessingOptions = PrecisionOptions
_IExecutionStrategy = ExecutionStrategy
_JitOptions = JitOptions
_PopartOptions = PopartOptions
_PrecisionOptions = PrecisionOptions
_TensorLocationOptions = TensorLocationOptions
_TrainingOptions = TrainingOptions

__all__ = [
    "Anchor",
    "BatchPlan",
    "ConfigFileError",
    "DistributedOptions",
    "ExecutionStrategy",
    "JitOptions",
    "Mode",
    "Options",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PlacementSettings",
    "PopartOptions",
    "PrecisionOptions",
    "ProcessSettings",
    "SerialPhasedExecution",
    "Settings",
    "ShardedExecution",
    "Stage",
    "StagePlan",
    "StrategyPlan",
    "TensorLocationOptions",
    "TensorLocationSettings",
    "TrainingOptions",
    "_DistributedOptions",
    "_GraphProcessingOptions",
    "_IExecutionStrategy",
    "_JitOptions",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
    "options_data",
    "options_from",
    "place_of_data",
    "reference",
    "resolve",
    "validate",
]
