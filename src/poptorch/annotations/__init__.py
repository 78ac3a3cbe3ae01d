"""What users write inside `forward`."""

from poptorch.annotations.attribute import Attribute
from poptorch.annotations.autocast import autocast
from poptorch.annotations.cpu import CPU
from poptorch.annotations.custom_op import custom_op, registerCustomOp
from poptorch.annotations.decoding import ctc_beam_search_decoder
from poptorch.annotations.losses import identity_loss
from poptorch.annotations.points import fps, nearest
from poptorch.annotations.where import isRunningOnIpu

__all__ = [
    "CPU",
    "Attribute",
    "autocast",
    "ctc_beam_search_decoder",
    "custom_op",
    "fps",
    "identity_loss",
    "isRunningOnIpu",
    "nearest",
    "registerCustomOp",
]
