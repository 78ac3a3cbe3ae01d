"""Farthest point sampling, as an op: how many points it takes is known before a batch is."""

from __future__ import annotations

import torch


@torch.library.custom_op("poptorch::farthest_points", mutates_args=())
def farthest_points(points: torch.Tensor, ends: list[int], counts: list[int], starts: torch.Tensor) -> torch.Tensor:
    """From each segment of rows, which starts where the one before ends, as many as `counts` says.

    The first is that of `starts`, counted from the segment's own first row; each other one is the row that is farthest
    from those taken before, and of several such rows the first.
    """
    chosen: list[torch.Tensor] = []
    for first, end, count, start in zip(ends, ends[1:], counts, starts.tolist(), strict=False):
        segment = points[first:end].detach()
        segment = segment if segment.dtype is torch.float64 else segment.float()
        distances = torch.full((end - first,), float("inf"), dtype=segment.dtype)
        taken = torch.zeros(count, dtype=torch.int64)
        newest = start
        for place in range(count):
            taken[place] = newest
            distances = torch.minimum(distances, (segment - segment[newest]).square().sum(1))
            newest = int(distances.argmax())
        chosen.append(taken + first)
    return torch.cat(chosen)


@farthest_points.register_fake
def _(points: torch.Tensor, ends: list[int], counts: list[int], starts: torch.Tensor) -> torch.Tensor:
    return points.new_empty(sum(counts), dtype=torch.int64)
