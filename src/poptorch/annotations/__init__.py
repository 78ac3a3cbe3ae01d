"""What users write inside `forward`."""

from poptorch.annotations.autocast import autocast
from poptorch.annotations.blocks import IPU, BeginBlock, Block, BlockFunction, removeBlocks
from poptorch.annotations.debugging import ipu_print_tensor, nop
from poptorch.annotations.losses import identity_loss
from poptorch.annotations.memory import (
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from poptorch.annotations.multi_conv import MultiConv
from poptorch.annotations.scopes import Attribute, NameScope
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
    "MultiConv",
    "NameScope",
    "ipu_print_tensor",
    "nop",
    "recomputationCheckpoint",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]
