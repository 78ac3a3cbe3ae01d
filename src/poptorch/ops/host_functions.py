"""The functions that `poptorch.CPU` calls, by the names that programs know them by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from poptorch.errors import EngineError, explain, nearest
from poptorch.ops.host_call import answers

HostFunction = Callable[..., Any]
KIND = "poptorch.CPU"
_FUNCTIONS: dict[str, list[HostFunction]] = {}  # by ID, in the order of registration


@dataclass(frozen=True)
class HostName:
    """The ID that the user gave to a function, and how many others were given the same before."""

    id: str
    number: int


def register(function: HostFunction, id: str) -> HostName:
    """Give a function a name; the same function keeps the one it has."""
    known = _FUNCTIONS.setdefault(id, [])
    for number, other in enumerate(known):
        if other is function or (isinstance(other, MethodType) and other == function):
            return HostName(id, number)
    known.append(function)
    return HostName(id, len(known) - 1)


def outputs_of(result: Any, id: str) -> list[torch.Tensor]:
    """The tensors that a function returned."""
    outputs = list(result) if isinstance(result, (list, tuple)) else [result]
    wrong = [type(output).__name__ for output in outputs if not isinstance(output, torch.Tensor)]
    if wrong or not outputs:
        raise EngineError(
            explain(
                f"the function of poptorch.CPU {id!r} returned {', '.join(wrong) or 'nothing'} instead of tensors.",
                fix="return a tensor, or a tuple or list of tensors",
            )
        )
    return outputs


@answers(KIND)
def _call(what: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a function on copies, as if its tensors came from a device: it may change them, and keep what it returns."""
    id, number = what
    known = _FUNCTIONS.get(id, [])
    if number >= len(known):
        raise EngineError(_unknown(id, number))
    with torch.no_grad():
        result = known[number](*[tensor.clone() for tensor in inputs])
        return [output.clone() for output in outputs_of(result, id)]


def _unknown(id: str, number: int) -> str:
    count = len(_FUNCTIONS.get(id, []))
    what = f"the program calls the host function {id!r}, which this process does not have{nearest(id, _FUNCTIONS)}"
    if count:
        what = f"the program calls number {number + 1} of the host functions {id!r}, and this process has {count}"
    return explain(f"{what}.", fix=f"create poptorch.CPU(function, {id!r}) before the program runs")
