"""The device that programs call "ipu": inside `forward` it is the one that the program runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PROGRAM = torch.device("cpu")  # where traced tensors are


def on_program_device(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a torch function with the device of the program in place of "ipu"."""
    names_device = func is torch.Tensor.to  # other functions take texts of another meaning by position
    args = tuple(_PROGRAM if _is_ipu(arg) and (names_device or not isinstance(arg, str)) else arg for arg in args)
    return args, {**kwargs, "device": _PROGRAM} if _is_ipu(kwargs.get("device")) else kwargs


def _is_ipu(value: object) -> bool:
    if isinstance(value, str):
        return value == "ipu" or (value.startswith("ipu:") and value[4:].isdigit())
    return isinstance(value, torch.device) and value.type == "ipu"
