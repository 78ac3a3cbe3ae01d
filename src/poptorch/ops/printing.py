"""An op that prints a tensor to stderr whenever a program comes by, and returns it; its derivative prints the gradient.

Native code keeps prints in order with `print_in_order`, which takes the result of the print before as well, and with
`wait_for` in front of a loop or branch that prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from poptorch.ops.tensor_text import TextFormat, tensor_text

_SILENT: ContextVar[bool] = ContextVar("poptorch_silent", default=False)


@contextmanager
def silent() -> Iterator[None]:
    """Nothing is printed inside: the values are those of a trace."""
    token = _SILENT.set(True)
    try:
        yield
    finally:
        _SILENT.reset(token)


@torch.library.custom_op("poptorch::print_tensor", mutates_args=())
def print_tensor(tensor: Tensor, title: str, number: int, print_gradient: bool, how: str) -> Tensor:
    """The same values, which are printed under a title. `number` is the same for a value and for its gradient.

    `how` is JSON text that describes a `TextFormat`. The compiler fills in a title that is empty.
    """
    _print(tensor, title, TextFormat(**json.loads(how)))
    return tensor.clone()


@torch.library.custom_op("poptorch::print_in_order", mutates_args=())
def print_in_order(tensors: Sequence[Tensor], said: str) -> Tensor:
    """The same for the first tensor; the others are only waited for. `said` has the title and the format, as hex."""
    title, how = json.loads(bytes.fromhex(said))
    _print(tensors[0], title, TextFormat(**how))
    return tensors[0].clone()


@torch.library.custom_op("poptorch::wait_for", mutates_args=())
def wait_for(tensor: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """The same values, when the other tensors are there."""
    return tensor.clone()


@wait_for.register_fake
def _(tensor: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(tensor)


@print_tensor.register_fake
def _(tensor: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(tensor)


@print_in_order.register_fake
def _(tensors: Sequence[Tensor], said: str) -> Tensor:
    return torch.empty_like(tensors[0])


def _print(tensor: Tensor, title: str, how: TextFormat) -> None:
    if not _SILENT.get():
        sys.stderr.write(f"{tensor_text(title, tensor, how)}\n")
        sys.stderr.flush()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.title, ctx.number, ctx.print_gradient, ctx.how = inputs


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.print_gradient:
        title = f"{ctx.title}_gradient" if ctx.title else ""
        gradient = print_tensor(gradient, title, ctx.number, True, ctx.how)
    return gradient, None, None, None, None


print_tensor.register_autograd(_differentiate, setup_context=_keep)


@print_tensor.register_vmap
def _(info: Any, dims: tuple[int | None, ...], tensor: Tensor, *rest: Any) -> Any:
    return print_tensor(tensor, *rest), dims[0]
