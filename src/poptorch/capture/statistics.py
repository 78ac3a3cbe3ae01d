"""The running statistics of PyTorch's norm layers, which a program keeps in float32 even if the layer is float16.

A variance easily exceeds 65504, and a running mean moves by less than float16 can tell apart.
"""

from __future__ import annotations

import torch
from torch import nn

_NAMES = ("running_mean", "running_var")


def is_widened(module: nn.Module, name: str, host: torch.dtype, program: torch.dtype) -> bool:
    """Whether a buffer of one type stands for an input of a program of the other, because it is such a statistic."""
    owner, _, attribute = name.rpartition(".")
    is_half = (host, program) == (torch.float16, torch.float32) and attribute in _NAMES
    return is_half and hasattr(module.get_submodule(owner), "track_running_stats")


def widened(module: nn.Module, name: str, buffer: torch.Tensor) -> torch.Tensor:
    """A buffer as a program has it."""
    return buffer.float() if is_widened(module, name, buffer.dtype, torch.float32) else buffer
