"""How ops compute on the values of all micro-batches at once, where the form of these values can be kept.

A rule takes the op as it is in the step, with wide values in place of its operands, at least one of which differs
between micro-batches. It gives the wide result, or None if it does not apply; then the op is mapped over stacked
values by `torch.func.vmap`, which knows most ops.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from poptorch.compiler.wide.values import Kind, Result, Wide, Writer
from poptorch.ir import value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Op:
    """One op of the step: its arguments hold wide values in place of nodes."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sums: Callable[[fx.Node], bool]  # whether only the sum of a value is needed

    @property
    def target(self) -> Any:
        return self.node.target

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result, for one micro-batch."""
        return tuple(value_of(self.node).shape)

    @property
    def operands(self) -> list[Wide]:
        return wides_in([self.args, self.kwargs])

    def argument(self, position: int, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else default

    def replaced(self, position: int, value: Any) -> tuple[Any, ...]:
        """The arguments with another one at a place; those in between that were left out must have defaults."""
        return (*self.args[:position], value, *self.args[position + 1 :])

    def result_sums(self, index: int) -> bool:
        """Whether only the sum of one of several results is needed."""
        return all(self.sums(user) for user in self.node.users if user.args[1] == index)


Rule = Callable[[Writer, Op], Result | None]


def wides_in(value: Any) -> list[Wide]:
    """The wide values inside nested arguments."""
    if isinstance(value, Wide):
        return [value]
    if isinstance(value, dict):
        return wides_in(list(cast("dict[str, Any]", value).values()))
    nested = cast("list[Any]", value) if isinstance(value, (list, tuple)) else []
    return [wide for item in nested for wide in wides_in(item)]


def substitute(value: Any, find: Callable[[Wide], fx.Node]) -> Any:
    """Nested arguments with nodes in place of wide values."""
    if isinstance(value, Wide):
        return find(value)
    if isinstance(value, dict):
        return {key: substitute(item, find) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        nested = [substitute(item, find) for item in cast("list[Any]", value)]
        return tuple(nested) if isinstance(value, tuple) else nested
    return value


def apply(writer: Writer, op: Op, find: Callable[[Wide], fx.Node], args: tuple[Any, ...] | None = None) -> fx.Node:
    """The same op on other tensors and, where given, with other arguments."""
    arguments = substitute(op.args if args is None else args, find)
    return writer.call(op.target, *arguments, **substitute(op.kwargs, find))


def items(writer: Writer, node: fx.Node, make: Sequence[Callable[[fx.Node], Wide]]) -> tuple[Wide | None, ...]:
    """The results of an op that has several, each as what `make` says it is."""
    values = value_of(node)
    return tuple(
        None if value is None else how(writer.call(operator.getitem, node, index))
        for index, (value, how) in enumerate(zip(values, make, strict=True))
    )


def _form(writer: Writer, wides: Sequence[Wide], dims: Sequence[int]) -> tuple[Callable[[Wide], fx.Node], int | None]:
    """How to bring operands of one rank into one form, for an op that works along these dimensions.

    Folded along a dimension that the op leaves alone if one of them is, otherwise stacked (then the second is None).
    """
    folds = [wide.dim for wide in wides if wide.kind is Kind.FOLDED and wide.dim not in dims]
    if folds:
        return lambda wide: writer.folded(wide, folds[0]), folds[0]
    return writer.stacked, None


def _normal(dims: Any, rank: int) -> list[int]:
    """Dimensions as a list of non-negative numbers; none stands for all."""
    listed = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return [dim % rank if rank else 0 for dim in listed]


# ---- ops that compute each element from those at the same place


def pointwise(writer: Writer, op: Op) -> Result | None:
    shape, rank = op.shape, len(op.shape)
    place = _common_fold(op.operands, shape)
    if place is not None:
        node = apply(writer, op, lambda x: x.node if x.is_shared else writer.folded(x, place - rank + len(x.shape)))
        return writer.as_folded(_typed(writer, op, node), place)

    def aligned(x: Wide) -> fx.Node:
        if x.is_shared:
            return x.node
        return writer.reshaped(writer.stacked(x), [writer.width, *[1] * (rank - len(x.shape)), *x.shape])

    return writer.as_stacked(_typed(writer, op, apply(writer, op, aligned)))


def of_one_shape(writer: Writer, op: Op) -> Result:
    """Ops that compute each element by itself, but do not repeat a tensor along dimensions that others have."""
    bring, place = _form(writer, op.operands, ())
    node = apply(writer, op, bring)
    return writer.as_stacked(node) if place is None else writer.as_folded(node, place)


def _common_fold(wides: Sequence[Wide], shape: tuple[int, ...]) -> int | None:
    """The dimension of the result along which all operands can be folded, or be the same for all rows."""
    rank = len(shape)
    for place in {wide.dim + rank - len(wide.shape) for wide in wides if wide.kind is Kind.FOLDED}:
        if all(_fits(wide, place - rank + len(wide.shape), shape[place]) for wide in wides):
            return place
    return None


def _fits(wide: Wide, dim: int, size: int) -> bool:
    if wide.is_shared:
        return dim < 0 or wide.shape[dim] == 1
    return dim >= 0 and wide.shape[dim] == size


def _typed(writer: Writer, op: Op, node: fx.Node) -> fx.Node:
    """Numbers that became vectors take part in type promotion; the result has the type that it has in the step."""
    wanted = value_of(op.node).dtype
    return node if value_of(node).dtype == wanted else writer.call(aten._to_copy.default, node, dtype=wanted)


def same_form(writer: Writer, op: Op) -> Result | None:
    """Copies and casts."""
    (x,) = op.operands
    layout = op.kwargs.get("memory_format")
    if x.kind is Kind.STACKED and layout in (torch.channels_last, torch.channels_last_3d):
        return writer.as_folded(apply(writer, op, writer.folded))
    return Wide(apply(writer, op, lambda wide: wide.node), x.kind, x.shape, x.dim)


def overwrite(writer: Writer, op: Op) -> Result | None:
    """A copy of all of the second operand in the place of the first."""
    target, source = op.args[:2]
    if target.shape != source.shape or target.dtype != source.dtype or source.is_shared:
        return None
    return Wide(writer.call(aten.clone.default, source.node), source.kind, source.shape, source.dim)


# ---- views


def reshape(writer: Writer, op: Op) -> Result | None:
    """Views that keep the order of elements."""
    x, shape = op.args[0], op.shape
    place = _place_after(x, shape) if x.kind is Kind.FOLDED else None
    if place is None:
        return writer.as_stacked(writer.reshaped(writer.stacked(x), [writer.width, *shape]))
    wide = [size * writer.width if dim == place else size for dim, size in enumerate(shape)]
    return writer.as_folded(writer.reshaped(x.node, wide), place)


def _place_after(x: Wide, shape: tuple[int, ...]) -> int | None:
    """Where the folded dimension is in the new shape: as many elements come before it as did."""
    before = math.prod(x.shape[: x.dim])
    places = [dim for dim in range(len(shape)) if math.prod(shape[:dim]) == before]
    same = [dim for dim in places if shape[dim] == x.shape[x.dim]]
    return (same or places or [None])[0]


def transpose(writer: Writer, op: Op) -> Result | None:
    x, rank = op.args[0], len(op.shape)
    order = list(range(rank))
    if op.target is aten.permute.default:
        order = _normal(op.args[1], rank)
    elif rank > 1:
        first, second = _normal(op.args[1:3] or (0, 1), rank)
        order[first], order[second] = order[second], order[first]
    if x.kind is Kind.FOLDED:
        return writer.as_folded(apply(writer, op, lambda wide: wide.node), order.index(x.dim))
    moved = writer.call(aten.permute.default, writer.stacked(x), [0, *(dim + 1 for dim in order)])
    return writer.as_stacked(moved)


def expand(writer: Writer, op: Op) -> Result | None:
    x, shape = op.args[0], list(op.shape)
    added = len(shape) - len(x.shape)
    if x.kind is Kind.FOLDED and shape[x.dim + added] == x.shape[x.dim]:
        shape[x.dim + added] *= writer.width
        return writer.as_folded(writer.call(op.target, x.node, shape), x.dim + added)
    aligned = writer.reshaped(writer.stacked(x), [writer.width, *[1] * added, *x.shape])
    return writer.as_stacked(writer.call(op.target, aligned, [writer.width, *shape]))


def along_dimension(removes: bool = False, default: int = 0) -> Rule:
    """Ops whose second argument is the one dimension that they work on: slices, selections, sums so far."""

    def rule(writer: Writer, op: Op) -> Result | None:
        x = op.args[0]
        if not isinstance(x, Wide) or len(op.operands) > 1 or not x.shape:
            return None
        dim = int(op.argument(1, default)) % len(x.shape)
        if x.kind is Kind.FOLDED and x.dim != dim:
            node = apply(writer, op, lambda wide: wide.node)
            return writer.as_folded(node, x.dim - int(removes and dim < x.dim))
        node = apply(writer, op, writer.stacked, op.replaced(1, dim + 1))
        return writer.as_stacked(node)

    return rule


def pad(writer: Writer, op: Op) -> Result | None:
    x = op.args[0]
    if x.kind is Kind.FOLDED and x.dim < len(x.shape) - len(op.args[1]) // 2:
        return writer.as_folded(apply(writer, op, lambda wide: wide.node), x.dim)
    return writer.as_stacked(apply(writer, op, writer.stacked))


def spread(writer: Writer, op: Op) -> Result | None:
    """The gradients of slices and selections: written into zeros of these sizes."""
    x, sizes, dim = op.args[0], list(op.args[1]), op.args[2] % len(op.args[1])
    place = x.dim + int(op.target is aten.select_backward.default and dim <= x.dim)
    if x.kind is Kind.FOLDED and place != dim:
        sizes[place] *= writer.width
        return writer.as_folded(writer.call(op.target, x.node, sizes, *op.args[2:]), place)
    sizes = [writer.width, *sizes]
    return writer.as_stacked(writer.call(op.target, writer.stacked(x), sizes, dim + 1, *op.args[3:]))


def concatenate(writer: Writer, op: Op) -> Result | None:
    parts, rank = op.args[0], len(op.shape)
    if any(len(part.shape) != rank for part in parts):
        return None
    dim = int(op.argument(1, 0)) % rank
    find, place = _form(writer, parts, [dim])
    nodes = [find(part) for part in parts]
    if place is None:
        return writer.as_stacked(writer.call(op.target, nodes, dim + 1))
    return writer.as_folded(writer.call(op.target, nodes, dim), place)


def pieces(writer: Writer, op: Op) -> Result | None:
    """Ops that cut a tensor along their last argument: `split`, `split_with_sizes`."""
    x = op.args[0]
    dim = int(op.argument(2, 0)) % len(x.shape)
    find, place = _form(writer, [x], [dim])
    node = writer.call(op.target, find(x), op.args[1], dim + int(place is None))
    return items(writer, node, [writer.as_form(place)] * len(value_of(node)))


# ---- ops along dimensions


def reduction(position: int = 1, keeps: int | None = 2) -> Rule:
    """Reductions over the dimensions at one position of the arguments; at another stands whether these remain."""

    def rule(writer: Writer, op: Op) -> Result | None:
        x = op.args[0]
        rank = len(x.shape)
        dims = _normal(op.argument(position), rank)
        kept = bool(op.kwargs.get("keepdim", op.argument(keeps, False) if keeps else False))
        if op.target is aten.sum.dim_IntList and x.kind is Kind.FOLDED and x.dim in dims and op.sums(op.node):
            return writer.as_summed(apply(writer, op, lambda wide: wide.node))
        if not rank or (not op.argument(position) and op.argument(position) != 0):
            return None
        find, place = _form(writer, [x], dims)
        if place is None and op.target is aten.sum.dim_IntList and op.sums(op.node) and not kept:
            every = [0, *(dim + 1 for dim in dims)]
            return writer.as_summed(apply(writer, op, find, op.replaced(position, every)))
        if place is None:
            moved = [dim + 1 for dim in dims]
            listed = op.args[position]
            node = apply(writer, op, find, op.replaced(position, moved[0] if isinstance(listed, int) else moved))
            return each(writer, node, writer.as_stacked)
        after = place if kept else place - sum(dim < place for dim in dims)
        return each(writer, apply(writer, op, find), lambda node: writer.as_folded(node, after))

    return rule


def each(writer: Writer, node: fx.Node, how: Callable[[fx.Node], Wide]) -> Result:
    value = value_of(node)
    return how(node) if isinstance(value, torch.Tensor) else items(writer, node, [how] * len(value))


def whole_sum(writer: Writer, op: Op) -> Result | None:
    """The sum or mean of all elements."""
    x = op.args[0]
    target = aten.sum.dim_IntList if op.target is aten.sum.default else aten.mean.dim
    if not x.shape or (op.kwargs.keys() - {"dtype"}):
        return None
    dims = list(range(1, len(x.shape) + 1))
    return writer.as_stacked(writer.call(target, writer.stacked(x), dims, **op.kwargs))


def keeping_sizes(position: int, default: int = -1) -> Rule:
    """Ops of one or more tensors of one rank along the dimension at this position, of which the others are rows."""

    def rule(writer: Writer, op: Op) -> Result | None:
        rank = len(op.operands[0].shape)
        if not rank or any(len(wide.shape) != rank for wide in op.operands) or len(op.args) < position:
            return None
        listed = op.argument(position, default)
        dims = _normal(listed, rank)
        find, place = _form(writer, op.operands, dims)
        if place is not None:
            return each(writer, apply(writer, op, find), lambda node: writer.as_folded(node, place))
        moved = [dim + 1 for dim in dims]
        given = op.replaced(position, moved[0] if isinstance(listed, int) else moved)
        return each(writer, apply(writer, op, find, given), writer.as_stacked)

    return rule


def rows(writer: Writer, op: Op) -> Result | None:
    """Ops that treat each entry of the first dimension of every tensor alike, such as pooling of images."""
    if any(len(wide.shape) < 3 for wide in op.operands):
        return None
    return each(writer, apply(writer, op, writer.folded), writer.as_folded)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.clone.default, aten._to_copy.default, aten.alias.default), same_form),
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
        ),
        reshape,
    ),
    **dict.fromkeys((aten.gelu_backward.default, aten.log_sigmoid_backward.default), of_one_shape),
    aten.copy.default: overwrite,
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), transpose),
    aten.expand.default: expand,
    aten.slice.Tensor: along_dimension(),
    aten.select.int: along_dimension(removes=True),
    aten.constant_pad_nd.default: pad,
    **dict.fromkeys((aten.select_backward.default, aten.slice_backward.default), spread),
    aten.cat.default: concatenate,
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), pieces),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default), reduction()),
    **dict.fromkeys((aten.any.dim, aten.all.dim, aten.max.dim, aten.min.dim, aten.prod.dim_int), reduction()),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.logsumexp.default), reduction()),
    **dict.fromkeys((aten.var_mean.correction, aten.var.correction, aten.std.correction), reduction(keeps=None)),
    **dict.fromkeys((aten.sum.default, aten.mean.default), whole_sum),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), keeping_sizes(1)),
    **dict.fromkeys((aten._softmax_backward_data.default, aten._log_softmax_backward_data.default), keeping_sizes(2)),
    **dict.fromkeys(
        (aten.cumsum.default, aten.cumprod.default, aten.flip.default, aten.sort.default), keeping_sizes(1)
    ),
    aten.topk.default: keeping_sizes(2),
    **dict.fromkeys(
        (
            aten.max_pool2d_with_indices.default,
            aten.max_pool2d_with_indices_backward.default,
            aten.avg_pool2d.default,
            aten.avg_pool2d_backward.default,
            aten._adaptive_avg_pool2d.default,
            aten._adaptive_avg_pool2d_backward.default,
        ),
        rows,
    ),
}
