"""What users write inside `forward`."""

from poptorch.annotations.autocast import autocast
from poptorch.annotations.blocks import IPU, BeginBlock, Block, BlockFunction, removeBlocks
from poptorch.annotations.control import cond, for_loop
from poptorch.annotations.cpu import CPU
from poptorch.annotations.custom_op import custom_op, registerCustomOp
from poptorch.annotations.debugging import ipu_print_tensor, nop
from poptorch.annotations.decoding import ctc_beam_search_decoder
from poptorch.annotations.losses import identity_loss
from poptorch.annotations.memory import (
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from poptorch.annotations.multi_conv import MultiConv
from poptorch.annotations.points import fps, nearest
from poptorch.annotations.scopes import Attribute, NameScope
from poptorch.annotations.slicing import dynamic_slice, dynamic_update
from poptorch.annotations.where import isRunningOnIpu

__all__ = [
    "Attribute",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CPU",
    "IPU",
    "MultiConv",
    "NameScope",
    "autocast",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "nearest",
    "nop",
    "recomputationCheckpoint",
    "registerCustomOp",
    "removeBlocks",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]
