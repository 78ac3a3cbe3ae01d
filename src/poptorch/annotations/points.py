"""`fps` and `nearest`: choose points of a cloud, and find the closest of others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from poptorch.capture import off_device
from poptorch.errors import ArgumentValueError, CompileError, explain
from poptorch.ops.points import farthest_points

Batch = Sequence[int] | torch.Tensor | None


def fps(src: torch.Tensor, ptr: list[int], ratio: float = 0.5, random_start: bool = False) -> torch.Tensor:
    """Choose points that lie far apart: the indices of a share of the rows of `src`, segment by segment.

    The segments are `src[ptr[0]:ptr[1]]`, `src[ptr[1]:ptr[2]]` and so on. From each comes its first row, or a random
    one, and then again and again the row that is farthest from all those that were chosen, until there are `ratio`
    times as many as it has, rounded up. No gradient passes.

    >>> import torch, poptorch
    >>> poptorch.fps(torch.tensor([[0.0], [1.0], [5.0], [9.0]]), [0, 4], ratio=0.75)
    tensor([0, 3, 2])
    """
    _check_points("fps", "src", src)
    _check_segments(src, ptr)
    if not 0 < ratio <= 1:
        raise CompileError(f"ratio of fps is {ratio}: it must be more than 0, and at most 1.")
    sizes = [end - first for first, end in pairwise(ptr)]
    exact = src.dtype if src.dtype is torch.float64 else torch.float32  # 0.07 of 100 are 7 points, not 8
    with off_device():
        counts = torch.ceil(torch.tensor(sizes, dtype=exact) * ratio).int().tolist()
    if random_start:
        starts = torch.stack([torch.randint(max(size, 1), ()) for size in sizes])
    else:
        starts = torch.zeros(len(sizes), dtype=torch.int64)
    chosen = farthest_points(src.detach().flatten(1), list(ptr), counts, starts)
    return chosen.clamp(0, max(len(src) - 1, 0))  # as it is: this tells the compiler what it may index


def _check_points(name: str, what: str, points: Any) -> None:
    if not isinstance(points, torch.Tensor):
        raise CompileError(f"{what} of {name} is a {type(points).__name__}, and must be a tensor.")
    if points.dim() == 0:
        raise CompileError(f"{what} of {name} is one number, and must have a row for each point.")


def _check_segments(src: torch.Tensor, ptr: Any) -> None:
    is_list = isinstance(ptr, (list, tuple)) and all(type(place) is int for place in ptr)
    if not is_list or len(ptr) < 2:
        raise CompileError(
            explain(
                f"ptr of fps is {ptr!r}.", fix="give a list of ints: where each segment of rows starts, and the end"
            )
        )
    if ptr[0] < 0 or ptr[-1] > len(src) or any(first > end for first, end in pairwise(ptr)):
        raise CompileError(f"ptr of fps is {ptr!r}: its numbers must rise, from 0 to {len(src)}, the number of rows.")


def nearest(x: torch.Tensor, y: torch.Tensor, batch_x: Batch = None, batch_y: Batch = None) -> torch.Tensor:
    """For each row of `x` the index of the row of `y` that is nearest, the first of several.

    Only rows of the same batch are looked at: `batch_x` and `batch_y` say, for each row, which one it belongs to, in
    rising order; if one is missing, that is batch 0 for all of its rows. Lists are checked when the model is compiled.

    >>> import torch, poptorch
    >>> poptorch.nearest(torch.tensor([0.1, 0.9]), torch.tensor([1.0, 0.0]))
    tensor([1, 0])
    """
    _check_points("nearest", "x", x)
    _check_points("nearest", "y", y)
    if x.dim() > 2 or y.dim() > 2:
        raise ArgumentValueError(f"nearest takes one row for each point, not shapes {list(x.shape)}, {list(y.shape)}.")
    x, y = (points.unsqueeze(1) if points.dim() == 1 else points for points in (x.detach(), y.detach()))
    if x.shape[1] != y.shape[1]:
        raise ArgumentValueError(f"points of x have {x.shape[1]} numbers, and points of y have {y.shape[1]}.")
    _check_batches(x, y, batch_x, batch_y)
    exact = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    distances = torch.cdist(x.to(exact), y.to(exact), compute_mode="donot_use_mm_for_euclid_dist")
    if batch_x is not None or batch_y is not None:
        of_x, of_y = _as_tensor(batch_x, x), _as_tensor(batch_y, y)
        distances = distances.masked_fill(of_x.unsqueeze(1) != of_y, float("inf"))
    return distances.argmin(1)


def _as_tensor(batch: Batch, points: torch.Tensor) -> torch.Tensor:
    if batch is None:
        return torch.zeros(len(points), dtype=torch.int64)
    return batch if isinstance(batch, torch.Tensor) else torch.tensor(list(batch), dtype=torch.int64)


def _check_batches(x: torch.Tensor, y: torch.Tensor, batch_x: Batch, batch_y: Batch) -> None:
    """What can be checked before values are known: sizes, and the numbers in lists."""
    for what, points, batch in (("batch_x", x, batch_x), ("batch_y", y, batch_y)):
        if batch is None:
            continue
        if len(batch) != len(points):
            raise ArgumentValueError(f"{what} of nearest has {len(batch)} items for {len(points)} points.")
        if not isinstance(batch, torch.Tensor) and any(a > b for a, b in pairwise(batch)):
            raise ArgumentValueError(f"{what} of nearest is {list(batch)}: it must be sorted.")
    if isinstance(batch_x, torch.Tensor) or isinstance(batch_y, torch.Tensor) or (batch_x is None and batch_y is None):
        return
    only = set(batch_x if batch_x is not None else [0]) ^ set(batch_y if batch_y is not None else [0])
    if only:
        raise ArgumentValueError(
            explain(
                f"batch {min(only)} of nearest has points in only one of x and y.",
                fix="give batch_x and batch_y the same numbers; without one, all of its points are in batch 0",
            )
        )
