"""Slices whose place is known only when the program runs: `dynamic_slice` and `dynamic_update`."""

from __future__ import annotations

from typing import Any

import torch

from poptorch.capture import is_capturing
from poptorch.capture.source import current_user_line
from poptorch.errors import ArgumentError, CompileError, Error, explain


def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """`tensor[start : start + size : step]` along a dimension, for a start that is computed or differs in every call.

    `start` is an integer tensor with one element. In a compiled model `size` divides the dimension, and a slice that
    goes beyond the end goes on at the beginning.

    >>> import poptorch, torch
    >>> poptorch.dynamic_slice(torch.arange(8), 0, torch.tensor([2]), 4, 2)
    tensor([2, 4])
    """
    name = "dynamic_slice"
    _require_arguments(name, {"tensor": tensor, "start": start}, {"dim": dim, "size": size, "step": step})
    if not is_capturing():
        first = int(start)
        return tensor[_along(tensor, dim, slice(first, first + size, step))]
    _require_size(name, size)
    if step < 1:
        raise _refused(name, f"the step is {step}, and must be 1 or more", "take a positive step, and flip the result")
    length = tensor.shape[dim]
    if length % size:
        raise _refused(
            name,
            f"the size of the slice ({size}) must be a factor of the slicing dimension ({length})",
            "take a slice of another size, or pad the tensor",
        )
    return tensor.index_select(dim, _places(start, size, step, length))


def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> torch.Tensor:
    """A copy of `input` in which `[start : start + size]` along a dimension is `src`.

    `start` is an integer tensor with one element, which may be computed or differ in every call. In a compiled model
    what goes beyond the end is written at the beginning.

    >>> import poptorch, torch
    >>> poptorch.dynamic_update(torch.zeros(4), torch.ones(2), 0, torch.tensor([1]), 2)
    tensor([0., 1., 1., 0.])
    """
    name = "dynamic_update"
    _require_arguments(name, {"input": input, "src": src, "start": start}, {"dim": dim, "size": size})
    if input.dim() != src.dim():
        what = f"input and src tensors must have same dimensionality. ({input.dim()}) vs ({src.dim()})"
        raise _refused(name, what, "unsqueeze one of them")
    if input.dtype != src.dtype:
        what = f"input and src tensor must have same dtype. ({input.dtype} vs {src.dtype})"
        raise _refused(name, what, "cast one of them")
    _require_size(name, size)
    wanted = [*input.shape]
    wanted[dim] = size
    if list(src.shape) != wanted:
        raise _refused(name, f"src has shape {list(src.shape)}, and the slice {wanted}", "give src that shape")
    if is_capturing():
        return input.index_copy(dim, _places(start, size, 1, input.shape[dim]), src)
    first = int(start)
    updated = input.clone()
    updated[_along(input, dim, slice(first, first + size))] = src
    return updated


def _along(tensor: torch.Tensor, dim: int, part: slice) -> tuple[slice, ...]:
    return (slice(None),) * (dim % tensor.dim()) + (part,)


def _places(start: torch.Tensor, size: int, step: int, length: int) -> torch.Tensor:
    """The indices of a slice, which goes on at the beginning after the end."""
    return (start.reshape(()).long() + torch.arange(0, size, step)) % length


def _require_arguments(name: str, tensors: dict[str, Any], numbers: dict[str, Any]) -> None:
    for argument, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise _wrong(name, f"{argument} must be a tensor, not {value!r}")
    for argument, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong(name, f"{argument} must be an int, not {value!r}")
    start, sliced = tensors["start"], next(iter(tensors.values()))
    if start.numel() != 1 or start.is_floating_point() or start.is_complex() or start.dtype is torch.bool:
        raise _wrong(name, f"start must be one integer, not {start.dtype} of shape {list(start.shape)}")
    if not -sliced.dim() <= numbers["dim"] < sliced.dim():
        raise _wrong(name, f"dim is {numbers['dim']}, and the tensor has {sliced.dim()} dimensions")


def _require_size(name: str, size: int) -> None:
    if size == 0:
        raise _refused(name, "the start and the end of the slice must be different", "take a size of 1 or more")
    if size < 0:
        raise _refused(name, f"a slice of size {size} has its end less than the start", "take a size of 1 or more")


def _wrong(name: str, what: str) -> Error:
    return ArgumentError(explain(f"poptorch.{name}(): {what}.", where=str(current_user_line())))


def _refused(name: str, what: str, fix: str) -> Error:
    return CompileError(explain(f"poptorch.{name}(): {what}.", where=str(current_user_line()), fix=fix))
