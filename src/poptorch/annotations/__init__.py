"""What users write inside `forward`."""

from poptorch.annotations.attribute import Attribute
from poptorch.annotations.autocast import autocast
from poptorch.annotations.blocks import IPU, BeginBlock, Block, BlockFunction, removeBlocks
from poptorch.annotations.losses import identity_loss
from poptorch.annotations.where import isRunningOnIpu

__all__ = [
    "Attribute",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "IPU",
    "autocast",
    "identity_loss",
    "isRunningOnIpu",
    "removeBlocks",
]
