"""Ops that compute nothing: a hint about a value on its way through a program, and one that is there to be seen.

Both return a copy, because an op of torch must not return its operand. The compiler writes hints on the ops that they
are about and removes them; engines remove what is left, so that neither costs anything when a program runs.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from poptorch.ir import HintValue


@torch.library.custom_op("poptorch::hint", mutates_args=())
def hint(tensor: torch.Tensor, kind: str, value: str) -> torch.Tensor:
    """The same values, with something that the user said about them; `value` is JSON text."""
    return tensor.clone()


@torch.library.custom_op("poptorch::nop", mutates_args=())
def nop(tensor: torch.Tensor) -> torch.Tensor:
    """The same values."""
    return tensor.clone()


for _op in (hint, nop):
    _op.register_fake(lambda tensor, *rest: torch.empty_like(tensor))


def _keep_hint(ctx: Any, inputs: tuple[torch.Tensor, str, str], output: torch.Tensor) -> None:
    ctx.said = inputs[1:]


def _hint_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return hint(gradient, *ctx.said), None, None


hint.register_autograd(_hint_gradient, setup_context=_keep_hint)
nop.register_autograd(lambda ctx, gradient: nop(gradient))


@hint.register_vmap
def _(info: Any, dims: tuple[int | None, ...], tensor: torch.Tensor, kind: str, value: str) -> Any:
    return hint(tensor, kind, value), dims[0]


@nop.register_vmap
def _(info: Any, dims: tuple[int | None, ...], tensor: torch.Tensor) -> Any:
    return nop(tensor), dims[0]


def hinted(tensor: torch.Tensor, kind: str, value: HintValue) -> torch.Tensor:
    """The same values with a hint."""
    return hint(tensor, kind, json.dumps(value))


HINT = torch.ops.poptorch.hint.default
NOP = torch.ops.poptorch.nop.default
