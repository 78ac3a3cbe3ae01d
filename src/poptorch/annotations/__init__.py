"""What users write inside `forward`."""

from poptorch.annotations.attribute import Attribute
from poptorch.annotations.autocast import autocast
from poptorch.annotations.losses import identity_loss
from poptorch.annotations.where import isRunningOnIpu

__all__ = ["Attribute", "autocast", "identity_loss", "isRunningOnIpu"]
