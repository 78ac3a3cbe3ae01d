"""See what a compiled model computes: print tensors while it runs, and operations that stay where they are."""

from __future__ import annotations

import json
from typing import Any

import torch

from poptorch.capture import is_capturing, next_number
from poptorch.errors import Error, FormatKeyError, explain
from poptorch.ops.identities import nop as _nop
from poptorch.ops.printing import print_tensor
from poptorch.ops.tensor_text import FLOAT_FORMATS, TextFormat


def ipu_print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    """Return `tensor`, and print it to stderr for every micro-batch; in training print its gradient too.

    Use what is returned in place of `tensor`: if nothing uses it, nothing is printed. Without a title the name of the
    tensor is printed, as `getTensorNames` gives it. Only the first character of `separator` and of the brackets
    counts. Of more than `summarise_threshold` elements only `edge_items` at the ends of each dimension are printed. A 0
    for the threshold, the width or the digits switches the limit off. Outside a compiled model nothing is printed.

    >>> import torch, poptorch
    >>> poptorch.ipu_print_tensor(torch.ones(2), "ones")
    tensor([1., 1.])
    """
    _check_tensor("ipu_print_tensor", tensor)
    if float_format not in FLOAT_FORMATS:
        formats = ", ".join(map(repr, FLOAT_FORMATS))
        raise FormatKeyError(
            explain(f"ipu_print_tensor has no float_format {float_format!r}.", fix=f"choose one of {formats}")
        )
    if not is_capturing():
        return tensor
    how = TextFormat(
        summarise_threshold=summarise_threshold,
        edge_items=edge_items,
        max_line_width=max_line_width,
        digits=digits,
        float_format=float_format,
        separator=separator[:1],
        open_bracket=open_bracket[:1],
        close_bracket=close_bracket[:1],
    )
    return print_tensor(tensor, title, next_number(), print_gradient, json.dumps(how.data()))


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` through an operation that the compiler leaves in the program, although it computes nothing.

    >>> import torch, poptorch
    >>> poptorch.nop(torch.ones(2))
    tensor([1., 1.])
    """
    _check_tensor("nop", tensor)
    return _nop(tensor) if is_capturing() else tensor


def _check_tensor(function: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise Error(
            explain(f"{function} takes a tensor, not {value!r}.", fix="pass a tensor that forward has or computes")
        )
