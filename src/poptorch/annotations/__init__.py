"""What users write inside `forward`."""

from poptorch.annotations.attribute import Attribute
from poptorch.annotations.autocast import autocast
from poptorch.annotations.control import cond, for_loop
from poptorch.annotations.losses import identity_loss
from poptorch.annotations.slicing import dynamic_slice, dynamic_update
from poptorch.annotations.where import isRunningOnIpu

__all__ = [
    "Attribute",
    "autocast",
    "cond",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "identity_loss",
    "isRunningOnIpu",
]
