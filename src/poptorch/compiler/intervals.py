"""What is known about the integers of a graph before it runs: between which numbers they lie.

Floating-point numbers are not followed: one that is not a number becomes an arbitrary integer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from poptorch.ir import value_of
from poptorch.ir.ranges import WITHIN

aten = torch.ops.aten
Interval = tuple[int, int]  # the least and the greatest
Known = Mapping[fx.Node, Interval]
Rule = Callable[[fx.Node, Known], "Interval | None"]


def known_intervals(ops: fx.Graph) -> dict[fx.Node, Interval]:
    """For each integer tensor of a graph about which something is known, an interval that holds all of it."""
    known: dict[fx.Node, Interval] = {}
    for node in ops.nodes:
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
            continue
        widest = (0, 1) if value.dtype is torch.bool else (torch.iinfo(value.dtype).min, torch.iinfo(value.dtype).max)
        rule = _RULES.get(node.target)
        found = None if rule is None else rule(node, known)
        if found is not None and widest[0] <= found[0] and found[1] <= widest[1]:
            known[node] = found
        elif widest[1] <= 255:
            known[node] = widest
    return known


def _of(argument: Any, known: Known) -> Interval | None:
    if isinstance(argument, fx.Node):
        return known.get(argument)
    is_whole = isinstance(argument, int) or (isinstance(argument, float) and argument.is_integer())
    return (int(argument), int(argument)) if is_whole else None


def _hull(arguments: Iterable[Any], known: Known) -> Interval | None:
    """An interval that holds everything in some arguments, if something is known about each."""
    found = [_of(argument, known) for argument in arguments]
    parts = [interval for interval in found if interval is not None]
    if len(parts) < len(found) or not parts:
        return None
    return min(low for low, _ in parts), max(high for _, high in parts)


def _below(size: int) -> Interval:
    return 0, max(size - 1, 0)


def _size(tensor: Any, dim: Any) -> int:
    shape = value_of(tensor).shape
    return shape[dim] if shape else 1


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _first(node: fx.Node, known: Known) -> Interval | None:
    """Some of the elements of the first operand, in any order."""
    return _of(node.args[0], known)


def _marked(node: fx.Node, known: Known) -> Interval | None:
    """What is marked is in its range when it goes on."""
    low, high = int(node.args[1]), int(node.args[2])  # pyright: ignore[reportArgumentType]
    before = _first(node, known) or (low, high)
    return (max(low, before[0]), min(high, before[1])) if low <= before[1] and before[0] <= high else (low, high)


def _any_of(*positions: int) -> Rule:
    return lambda node, known: _hull([node.args[position] for position in positions], known)


def _joined(node: fx.Node, known: Known) -> Interval | None:
    return _hull(node.args[0], known)  # pyright: ignore[reportArgumentType]


def _arithmetic(compute: Callable[[int, int], int]) -> Rule:
    """For an operation that is largest and smallest at ends of its operands' intervals."""

    def rule(node: fx.Node, known: Known) -> Interval | None:
        a, b = _of(node.args[0], known), _of(node.args[1], known)
        if a is None or b is None or _argument(node, 2, "alpha", 1) != 1:
            return None
        ends = [compute(x, y) for x in a for y in b]
        return min(ends), max(ends)

    return rule


def _quotient(node: fx.Node, known: Known) -> Interval | None:
    """Of a division by a positive number that rounds down, or towards zero."""
    a, divisor, rounding = _first(node, known), node.args[1], node.kwargs.get("rounding_mode", "floor")
    if a is None or not isinstance(divisor, int) or divisor <= 0 or rounding is None:
        return None
    return a[0] // divisor, max(a[1] // divisor, 0)


def _remainder(node: fx.Node, known: Known) -> Interval | None:
    divisor = _of(node.args[1], known)
    return (0, divisor[1] - 1) if divisor is not None and divisor[0] > 0 else None


def _masked_bits(node: fx.Node, known: Known) -> Interval | None:
    found = [interval for interval in (_of(node.args[0], known), _of(node.args[1], known)) if interval is not None]
    limits = [high for low, high in found if low >= 0]
    return (0, min(limits)) if limits else None


def _negated(node: fx.Node, known: Known) -> Interval | None:
    a = _first(node, known)
    return None if a is None else (-a[1], -a[0])


def _magnitude(node: fx.Node, known: Known) -> Interval | None:
    a = _first(node, known)
    return None if a is None else (max(a[0], -a[1], 0), max(-a[0], a[1]))


def _clamped(node: fx.Node, known: Known) -> Interval | None:
    is_upper = node.target is aten.clamp_max.default
    is_lower = node.target is aten.clamp_min.default
    low = None if is_upper else _of(_argument(node, 1, "min", None), known)
    high = None if is_lower else _of(_argument(node, 1 if is_upper else 2, "max", None), known)
    inside = _first(node, known)
    if inside is None:
        return None if low is None or high is None else (min(low[0], high[0]), high[1])
    least, most = inside
    if low is not None:
        least, most = max(least, low[0]), max(most, low[1])
    if high is not None:
        least, most = min(least, high[0]), min(most, high[1])
    return least, most


def _extreme(choose: Callable[[int, int], int]) -> Rule:
    def rule(node: fx.Node, known: Known) -> Interval | None:
        a, b = _of(node.args[0], known), _of(node.args[1], known)
        return None if a is None or b is None else (choose(a[0], b[0]), choose(a[1], b[1]))

    return rule


def _total(node: fx.Node, known: Known) -> Interval | None:
    """Of a sum over some dimensions, or of a cumulative one."""
    a, dims = _first(node, known), _argument(node, 1, "dim", None)
    if a is None:
        return None
    summed = (
        range(len(_shape(node.args[0]))) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    )
    count = math.prod(_size(node.args[0], dim) for dim in summed)
    return min(a[0] * count, a[0], 0), max(a[1] * count, a[1], 0)


def _counted(node: fx.Node, known: Known) -> Interval | None:
    return 0, math.prod(_shape(node.args[0]))


def _filled(position: int) -> Rule:
    return lambda node, known: _of(node.args[position], known)


def _always(low: int, high: int) -> Rule:
    return lambda node, known: (low, high)


def _ranged(node: fx.Node, known: Known) -> Interval | None:
    numbers: list[Any] = list(node.args)
    start, step = (0 if len(numbers) == 1 else numbers[0]), (numbers[2] if len(numbers) > 2 else 1)
    if not all(isinstance(number, int) for number in numbers):
        return None
    last = start + (value_of(node).numel() - 1) * step
    return min(start, last), max(start, last)


def _drawn(low: int | None, high: int) -> Rule:
    """For an op that draws below one of its arguments, and from another one on."""

    def rule(node: fx.Node, known: Known) -> Interval | None:
        least, limit = (0 if low is None else node.args[low]), node.args[high]
        return (least, limit - 1) if isinstance(least, int) and isinstance(limit, int) else None

    return rule


def _chosen(node: fx.Node, known: Known) -> Interval | None:
    """Of the position of a greatest or smallest element."""
    dim = _argument(node, 1, "dim", None)
    return _below(math.prod(_shape(node.args[0])) if dim is None else _size(node.args[0], dim))


def _samples(node: fx.Node, known: Known) -> Interval | None:
    return _below(_size(node.args[0], -1))


def _insertion_points(boundaries: int) -> Rule:
    return lambda node, known: (0, _size(node.args[boundaries], -1))


def _padded(node: fx.Node, known: Known) -> Interval | None:
    return _hull([node.args[0], _argument(node, 2, "value", 0)], known)


def _nonzero(node: fx.Node, known: Known) -> Interval | None:
    fill: Any = node.kwargs.get("fill_value", -1)
    return min(fill, 0), max(fill, 0, *(size - 1 for size in _shape(node.args[0])))


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(value_of(node).shape)


# Ops with several results: which argument names the dimension that positions, the second result, belong to.
_WITH_POSITIONS: dict[Any, tuple[int, Any]] = {
    aten.topk.default: (2, -1),
    aten.sort.default: (1, -1),
    aten.sort.stable: (1, -1),
    aten.max.dim: (1, -1),
    aten.min.dim: (1, -1),
    aten.kthvalue.default: (2, -1),
    aten.mode.default: (1, -1),
    aten.median.dim: (1, -1),
    aten.nanmedian.dim: (1, -1),
    aten.cummax.default: (1, -1),
    aten.cummin.default: (1, -1),
}
_POOLS: dict[Any, int] = {  # and how many dimensions an image has
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
    aten.fractional_max_pool2d.default: 2,
    aten.fractional_max_pool3d.default: 3,
}
_PIECES = frozenset(
    {aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.chunk.default}
)


def _item(node: fx.Node, known: Known) -> Interval | None:
    source: Any = node.args[0]
    position, target = node.args[1], source.target
    if target in _WITH_POSITIONS:
        argument, default = _WITH_POSITIONS[target]
        dim = _argument(source, argument, "dim", default)
        return _below(_size(source.args[0], dim)) if position == 1 else _of(source.args[0], known)
    if target in _POOLS:
        image = _shape(source.args[0])[-_POOLS[target] :]
        return _below(math.prod(image)) if position == 1 else _of(source.args[0], known)
    if target in _PIECES:
        return _coordinates(source, position) or _of(source.args[0], known)
    return None


def _coordinates(pieces: fx.Node, position: Any) -> Interval | None:
    """Of one coordinate of the elements of a mask that are set."""
    table: Any = pieces.args[0]
    if table.target is not aten.nonzero_static.default or pieces.target is not aten.unbind.int:
        return None
    if _argument(pieces, 1, "dim", 0) not in (1, -1) or table.kwargs.get("fill_value", -1) != 0:
        return None
    return _below(_shape(table.args[0])[int(position)])


# fmt: off
_SOME_ELEMENTS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default, aten.detach.default,
    aten.alias.default, aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.slice.Tensor,
    aten.select.int, aten.index_select.default, aten.gather.default, aten.index.Tensor, aten._unsafe_index.Tensor,
    aten.take.default, aten.flip.default, aten.roll.default, aten.repeat.default, aten.unfold.default,
    aten.diagonal.default, aten.lift_fresh_copy.default, aten.amax.default, aten.amin.default, aten.max.default,
    aten.min.default,
)
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_SOME_ELEMENTS, _first),
    WITHIN: _marked,
    operator.getitem: _item,
    aten._to_copy.default: _first,
    **dict.fromkeys((aten.cat.default, aten.stack.default), _joined),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar), _any_of(1, 2)),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _any_of(0, 2)),
    **dict.fromkeys((aten.scatter.src, aten.scatter.value), _any_of(0, 3)),
    **dict.fromkeys((aten.slice_scatter.default, aten.select_scatter.default), _any_of(0, 1)),
    aten.constant_pad_nd.default: _padded,
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _arithmetic(operator.add)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _arithmetic(operator.sub)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _arithmetic(operator.mul)),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), _arithmetic(lambda a, b: b - a)),
    **dict.fromkeys((aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode), _quotient),
    **dict.fromkeys((aten.remainder.Scalar, aten.remainder.Tensor), _remainder),
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.bitwise_and.Scalar), _masked_bits),
    aten.neg.default: _negated,
    aten.abs.default: _magnitude,
    **dict.fromkeys(
        (aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default), _clamped
    ),
    aten.maximum.default: _extreme(max),
    aten.minimum.default: _extreme(min),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.cumsum.default), _total),
    **dict.fromkeys((aten.count_nonzero.default, aten.count_nonzero.dim_IntList), _counted),
    **dict.fromkeys((aten.full.default, aten.full_like.default), _filled(1)),
    aten.scalar_tensor.default: _filled(0),
    aten.new_full.default: _filled(2),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), _always(0, 0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _always(1, 1)),
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _ranged),
    **dict.fromkeys((aten.randint.default, aten.randint.generator), _drawn(None, 0)),
    **dict.fromkeys((aten.randint.low, aten.randint.low_generator), _drawn(0, 1)),
    aten.randint_like.default: _drawn(None, 1),
    aten.randint_like.low_dtype: _drawn(1, 2),
    **dict.fromkeys((aten.randperm.default, aten.randperm.generator), _drawn(None, 0)),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default), _chosen),
    aten.multinomial.default: _samples,
    aten.searchsorted.Tensor: _insertion_points(0),
    **dict.fromkeys((aten.bucketize.Tensor, aten.bucketize.Scalar), _insertion_points(1)),
    aten.nonzero_static.default: _nonzero,
}
# fmt: on
