"""Ops whose results have sizes that depend on values, in forms whose sizes are those of the first batch.

What decided a size becomes a guard of the graph, so that a later batch that would have another one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from poptorch.capture.private import OpOverload
from poptorch.ir import SourceLine
from poptorch.ir.ranges import NO_LIMIT, adding_up_to, within

if TYPE_CHECKING:
    from poptorch.capture.watch import Watch

aten = torch.ops.aten
Op = OpOverload
NO_RESULT = object()  # of an op that has run and gives nothing


def _static_nonzero(watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None) -> Any:
    mask = args[0] != 0
    size = watch.known_count(mask)
    watch.freeze_count(mask.sum(), size, line)
    return aten.nonzero_static.default(args[0], size=size, fill_value=0)  # in range, if a batch has too few


def _static_mask_index(watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None) -> Any:
    """`x[mask]` as an index with as many positions as the mask selects in the first batch."""
    tensor, indices = args
    if not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return None
    return aten.index.Tensor(tensor, _positions(watch, indices, line))


def _positions(watch: Watch, indices: list[torch.Tensor | None], line: SourceLine | None) -> list[torch.Tensor | None]:
    """Indices with each mask replaced by the positions that it selects, as many as in the first batch."""
    expanded: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded.append(index)
        else:
            expanded.extend(_static_nonzero(watch, (index,), {}, line).unbind(1))
    return expanded


def _static_mask_put(watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None) -> Any:
    """`x[mask] = values` with as many positions as there are values; one value for all positions needs no count."""
    tensor, indices, values, *rest = args
    masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if not masks or values.numel() == 1:
        return None
    return aten.index_put.default(tensor, _positions(watch, indices, line), values, *rest, **kwargs)


def _static_mask_put_in_place(
    watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None
) -> Any:
    result = _static_mask_put(watch, args, kwargs, line)
    return None if result is None else args[0].copy_(result)


def _static_masked_select(watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None) -> Any:
    tensor, mask = (part.flatten() for part in torch.broadcast_tensors(*args))  # a number, too, is one element
    return _static_mask_index(watch, (tensor, [mask]), {}, line)


def _static_repeat(watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None) -> Any:
    if kwargs.get("output_size") is not None:
        return None
    repeats = within(args[0], 0, NO_LIMIT, "repeat_interleave", "number of repeats")
    total = repeats.sum()
    size = watch.known_count(total)
    watch.freeze_count(total, size, line)
    ends = repeats.cumsum(0)  # the op itself would fail before the guard can tell why
    return torch.searchsorted(ends, torch.arange(size), right=True).clamp(max=len(ends) - 1).to(args[0].dtype)


def _static_unique(
    watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`torch.unique` with as many values as the first batch has."""
    ordered, order = args[0].flatten().sort()
    return _static_runs(watch, ordered, order, args[0].shape, line)


def _static_unique_consecutive(
    watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if args[3:] not in ((), (None,)):
        return _counted_slices(watch, aten.unique_dim_consecutive.default(args[0], args[3], True, True), args[3], line)
    return _static_runs(watch, args[0].flatten(), torch.arange(args[0].numel()), args[0].shape, line)


def _unique_slices(
    watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`torch.unique` along a dimension: PyTorch's own op, and a guard that it finds as many in every batch."""
    x, dim, *is_sorted = args[:3]
    return _counted_slices(watch, aten.unique_dim.default(x, dim, *is_sorted, True, True), dim, line)


def _counted_slices(
    watch: Watch, found: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dim: int, line: SourceLine | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    slices, inverse, _ = found
    watch.freeze_count(inverse.max() + 1, slices.shape[dim], line)
    return found


def _static_runs(
    watch: Watch, values: torch.Tensor, order: torch.Tensor, shape: torch.Size, line: SourceLine | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The value of each run of equal values, which run each element belongs to, and how long each run is."""
    starts = torch.ones_like(values, dtype=torch.bool)
    starts[1:] = values[1:] != values[:-1]
    first = _static_nonzero(watch, (starts,), {}, line).squeeze(1)
    run = starts.cumsum(0) - 1
    lengths = torch.zeros(starts.shape, dtype=torch.int64).index_add(0, run, torch.ones_like(run))
    return values[first], torch.empty_like(run).index_copy(0, order, run).view(shape), lengths[: len(first)]


def _static_bincount(watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None) -> Any:
    """`torch.bincount` with as many bins as in the first batch."""
    values: torch.Tensor = args[0]
    weights: torch.Tensor | None = args[1] if len(args) > 1 else None
    if not values.numel():
        return None
    values = within(values, 0, NO_LIMIT, "bincount", "value")
    bins = (values.max() + 1).clamp(min=args[2] if len(args) > 2 else 0)
    size = watch.known_count(bins)
    watch.freeze_count(bins, size, line)
    if weights is None:
        weights = torch.ones_like(values, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.double()
    return torch.zeros(size, dtype=weights.dtype).index_add(0, values.clamp(0, size - 1), weights)


def _masked_scatter(in_place: bool) -> Callable[..., Any]:
    """`masked_scatter`, which has to find as many values as its mask asks for."""
    op = aten.masked_scatter_.default if in_place else aten.masked_scatter.default

    def scatter(watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None) -> Any:
        tensor, mask, source = args
        wanted = mask.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum()
        has_enough = within(wanted, 0, source.numel(), "masked_scatter", "number of values") == wanted
        return op(tensor, mask & has_enough, source)

    return scatter


def _embedding_bag(op: Op) -> Callable[..., Any]:
    """A sum over rows, in which each bag starts somewhere among the indices."""

    def sum_bags(watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None) -> Any:
        weight, indices, starts, *rest = args
        if not starts.numel():
            return None
        first = within(starts[:1], 0, 0, "embedding_bag", "start of the first bag")
        others = within(starts[1:], 0, indices.numel(), "embedding_bag", "start of a bag")
        return op(weight, indices, torch.cat([first, others]), *rest, **kwargs)

    return sum_bags


def _segment_reduce(watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None) -> Any:
    """A reduction of segments that lie one after the other, and are together as long as the data."""
    data, name, axis = args[0], "segment_reduce", kwargs.get("axis", 0)
    size, options = data.shape[axis], dict(kwargs)
    lengths, starts = kwargs.get("lengths"), kwargs.get("offsets")
    if lengths is not None and lengths.numel():
        lengths = within(lengths, 0, size, name, "length")
        options["lengths"] = adding_up_to(size, lengths, name, "sum of lengths")
    if starts is not None and starts.numel():
        first = within(starts.narrow(axis, 0, 1), 0, size, name, "offset")
        steps = within(starts.diff(dim=axis), 0, size, name, "length")
        ends = torch.cat([first, first + steps.cumsum(axis)], axis)
        options["offsets"] = within(ends, 0, size, name, "offset")
    return aten.segment_reduce.default(*args, **options)


def _checked_linalg(watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None) -> Any:
    """Linear algebra reports a singular matrix in `info`: the check becomes a guard of the program."""
    watch.freeze_success(args[0], str(args[1]), line)
    return NO_RESULT


STATIC_FORMS: dict[Op, Callable[..., Any]] = {
    aten.nonzero.default: _static_nonzero,
    aten.index.Tensor: _static_mask_index,
    aten.index_put.default: _static_mask_put,
    aten.index_put_.default: _static_mask_put_in_place,
    aten.masked_select.default: _static_masked_select,
    aten.repeat_interleave.Tensor: _static_repeat,
    aten.bincount.default: _static_bincount,
    aten._unique2.default: _static_unique,
    aten.unique_consecutive.default: _static_unique_consecutive,
    aten.unique_dim.default: _unique_slices,
    aten._linalg_check_errors.default: _checked_linalg,
    aten.masked_scatter.default: _masked_scatter(in_place=False),
    aten.masked_scatter_.default: _masked_scatter(in_place=True),
    aten._embedding_bag.default: _embedding_bag(aten._embedding_bag.default),
    aten._embedding_bag_forward_only.default: _embedding_bag(aten._embedding_bag_forward_only.default),
    aten.segment_reduce.default: _segment_reduce,
}
