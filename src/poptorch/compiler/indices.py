"""Which arguments of which ops are indices, and the range they must be in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from poptorch.ir import value_of
from poptorch.ir.ops import as_op
from poptorch.ir.ranges import WITHIN, Range

aten = torch.ops.aten
Use = tuple[fx.Node, Range]


def index_uses(node: fx.Node) -> Iterator[Use]:
    """The integers that an op takes as indices, or a marker marks, with their range."""
    find = _FINDERS.get(node.target)
    op = as_op(node.target)
    if find is None or op is None:
        return
    name = op.overloadpacket.__name__.removeprefix("_").partition("_forward")[0]
    for index, allowed in find(node, name):
        value = value_of(index) if isinstance(index, fx.Node) else None
        if value is not None and value.numel() and not (value.is_floating_point() or value.is_complex()):
            yield index, allowed


Finder = Callable[[fx.Node, str], Iterator[tuple[Any, Range]]]


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(value_of(node).shape)


def _marked(node: fx.Node, name: str) -> Iterator[tuple[Any, Range]]:
    values, low, high, op, what = node.args
    yield values, Range(low, high, op, what)  # pyright: ignore[reportArgumentType]


def _rows(node: fx.Node, name: str) -> Iterator[tuple[Any, Range]]:
    yield node.args[1], Range(0, _shape(node.args[0])[0] - 1, name)


def _along_dimension(node: fx.Node, name: str, wraps: bool = False) -> Iterator[tuple[Any, Range]]:
    shape, dim = _shape(node.args[0]), int(node.args[1])  # pyright: ignore[reportArgumentType]
    size = shape[dim] if shape else 1
    yield node.args[2], Range(-size if wraps else 0, size - 1, name)


def _wrapping_along_dimension(node: fx.Node, name: str) -> Iterator[tuple[Any, Range]]:
    return _along_dimension(node, name, wraps=True)


def _of_all_elements(node: fx.Node, name: str) -> Iterator[tuple[Any, Range]]:
    count = math.prod(_shape(node.args[0]))
    yield node.args[1], Range(-count, count - 1, name)


def _in_lists(node: fx.Node, name: str) -> Iterator[tuple[Any, Range]]:
    shape, entries = _shape(node.args[0]), list[Any](node.args[1])  # pyright: ignore[reportArgumentType]
    if any(entry is not None and value_of(entry).dtype in (torch.bool, torch.uint8) for entry in entries):
        return
    for size, entry in zip(shape, entries, strict=False):
        if entry is not None:
            yield entry, Range(-size, size - 1, name)


def _classes(node: fx.Node, name: str) -> Iterator[tuple[Any, Range]]:
    shape: tuple[int, ...] = _shape(node.args[0])
    ignored: Any = node.args[4]
    yield node.args[1], Range(0, shape[1 if len(shape) > 1 else 0] - 1, name, ignored=ignored)


def _margin_labels(node: fx.Node, name: str) -> Iterator[tuple[Any, Range]]:
    lowest = -1 if node.target is aten.multilabel_margin_loss_forward.default else 0  # -1 ends a list of labels
    *_, classes = (1, *_shape(node.args[0]))  # a number is the score of the only class
    yield node.args[1], Range(lowest, classes - 1, name)


def _places_in_images(node: fx.Node, name: str) -> Iterator[tuple[Any, Range]]:
    size: Any = node.args[2]
    yield node.args[1], Range(0, math.prod(size) - 1, name)


def _sorters(node: fx.Node, name: str) -> Iterator[tuple[Any, Range]]:
    yield node.kwargs.get("sorter"), Range(0, _shape(node.args[0])[-1] - 1, name)


def _pivots(node: fx.Node, name: str) -> Iterator[tuple[Any, Range]]:
    size = _shape(node.args[0])[-2]
    yield node.args[1], Range(-size if node.target is aten.linalg_ldl_solve.default else 1, size, name, "pivot")


_FINDERS: dict[Any, Finder] = {
    WITHIN: _marked,
    **dict.fromkeys((aten.embedding.default, aten.embedding_renorm.default), _rows),
    **dict.fromkeys((aten._embedding_bag.default, aten._embedding_bag_forward_only.default), _rows),
    **dict.fromkeys(
        (
            aten.gather.default,
            aten.index_select.default,
            aten.scatter.src,
            aten.scatter.value,
            aten.scatter.reduce,
            aten.scatter.value_reduce,
            aten.scatter_add.default,
            aten.scatter_reduce.two,
            aten.index_add.default,
            aten.index_copy.default,
            aten.index_reduce.default,
        ),
        _along_dimension,
    ),
    **dict.fromkeys((aten.index_fill.int_Scalar, aten.index_fill.int_Tensor), _wrapping_along_dimension),
    **dict.fromkeys((aten.take.default, aten.put.default), _of_all_elements),
    **dict.fromkeys(
        (
            aten.index.Tensor,
            aten.index_put.default,
            aten._unsafe_index.Tensor,
            aten._unsafe_index_put.default,
        ),
        _in_lists,
    ),
    **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), _classes),
    **dict.fromkeys((aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default), _margin_labels),
    **dict.fromkeys((aten.max_unpool2d.default, aten.max_unpool3d.default), _places_in_images),
    **dict.fromkeys((aten.searchsorted.Tensor, aten.searchsorted.Scalar), _sorters),
    **dict.fromkeys((aten.lu_unpack.default, aten.linalg_lu_solve.default, aten.linalg_ldl_solve.default), _pivots),
}
