"""The fluent `Options`, and the frozen `Settings` it turns into."""

from poptorch.options.batching import BatchPlan
from poptorch.options.options import Options, Settings, _TrainingOptions, resolve  # pyright: ignore

__all__ = ["BatchPlan", "Options", "Settings", "_TrainingOptions", "resolve"]
