"""What users write inside `forward`."""

from poptorch.annotations.losses import identity_loss
from poptorch.annotations.where import isRunningOnIpu

__all__ = ["identity_loss", "isRunningOnIpu"]
