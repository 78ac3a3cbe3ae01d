"""Rules for the ops of layers and losses: products, convolutions, norms, embeddings, attention.

Where an op also gives the gradient of a weight, of which only the sum over micro-batches is needed, one call over the
rows of all micro-batches gives that sum.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from poptorch.compiler.wide.rules import Op, Rule, apply, each, items, substitute, wides_in
from poptorch.compiler.wide.values import NARROW_FLOATS, Kind, Result, Wide, Writer
from poptorch.ir import value_of

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # reductions of losses


# ---- products


def matrix_product(writer: Writer, op: Op) -> Result | None:
    a, b = op.args
    if op.sums(op.node) and (a.is_shared or b.is_shared):
        return writer.as_summed(apply(writer, op, lambda x: x.node if x.is_shared else writer.summed(x)))
    if b.is_shared:
        return writer.as_folded(writer.call(op.target, writer.folded(a), b.node))
    if a.is_shared:
        return writer.as_folded(writer.call(op.target, a.node, writer.folded(b, 1)), 1)
    if op.sums(op.node):
        return writer.as_summed(writer.call(op.target, writer.folded(a, 1), writer.folded(b, 0)))
    return writer.as_stacked(writer.call(aten.bmm.default, writer.stacked(a), writer.stacked(b)))


def product_with_bias(writer: Writer, op: Op) -> Result | None:
    bias, _, b = op.args
    if not (bias.is_shared and b.is_shared) or (len(bias.shape) == 2 and bias.shape[0] != 1):
        return None
    return writer.as_folded(apply(writer, op, lambda x: x.node if x.is_shared else writer.folded(x)))


def batch_of_products(writer: Writer, op: Op) -> Result | None:
    return writer.as_folded(apply(writer, op, writer.folded))


# ---- convolutions


def convolution(writer: Writer, op: Op) -> Result | None:
    x, weight, bias = op.args[:3]
    if not weight.is_shared or (bias is not None and not bias.is_shared) or len(x.shape) != len(weight.shape):
        return None
    return writer.as_folded(apply(writer, op, lambda wide: wide.node if wide.is_shared else writer.folded(wide)))


def convolution_backward(writer: Writer, op: Op) -> Result | None:
    gradient, x, weight = op.args[:3]
    if not weight.is_shared or len(x.shape) != len(weight.shape):
        return None
    rest = (writer.folded(gradient), writer.folded(x), weight.node, *op.args[3:])
    return _with_weight_sums(writer, op, writer.as_folded, rest)


def _with_weight_sums(writer: Writer, op: Op, how: Any, arguments: tuple[Any, ...]) -> Result | None:
    """The results of a backward op: the gradient of the activation, and the sums of those of weight and bias."""
    if not (op.result_sums(1) and op.result_sums(2)):
        return None
    node = writer.call(op.target, *arguments)
    return items(writer, node, [how, writer.as_summed, writer.as_summed])


# ---- norms


def layer_norm(writer: Writer, op: Op) -> Result | None:
    x, sizes, weight, bias = op.args[:4]
    if any(isinstance(each, Wide) and not each.is_shared for each in (weight, bias)):
        return None
    is_kept = x.kind is Kind.FOLDED and x.dim < len(x.shape) - len(sizes)
    first = x.node if is_kept else writer.stacked(x)
    node = writer.call(op.target, first, *substitute(op.args[1:], lambda wide: wide.node))
    return each(writer, node, writer.as_form(x.dim if is_kept else None))


def layer_norm_backward(writer: Writer, op: Op) -> Result | None:
    gradient, x, sizes, mean, rstd, weight, bias, mask = op.args
    if any(isinstance(each, Wide) and not each.is_shared for each in (weight, bias)):
        return None
    batched = (gradient, x, mean, rstd)
    dims = {wide.dim for wide in batched if wide.kind is Kind.FOLDED}
    is_kept = len(dims) == 1 and max(dims) < len(x.shape) - len(sizes)
    dim = dims.pop() if is_kept else 0
    g, x_, m, r = (writer.folded(wide, dim) if is_kept else writer.stacked(wide) for wide in batched)
    w, b = substitute((weight, bias), lambda wide: wide.node)
    how = writer.as_form(dim if is_kept else None)
    return _with_weight_sums(writer, op, how, (g, x_, sizes, m, r, w, b, mask))


def fixed_batch_norm(writer: Writer, op: Op) -> Result | None:
    """Batch normalisation by statistics that are not those of the batch, but the same for all."""
    if any(not wide.is_shared for wide in wides_in(op.args[1:])):
        return None
    node = writer.call(op.target, writer.folded(op.args[0]), *substitute(op.args[1:], lambda wide: wide.node))
    return items(writer, node, [writer.as_folded, writer.shared, writer.shared])


def fixed_batch_norm_backward(writer: Writer, op: Op) -> Result | None:
    if op.args[7] or any(not wide.is_shared for wide in wides_in(op.args[2:])):
        return None
    rest = substitute(op.args[2:], lambda wide: wide.node)
    arguments = (writer.folded(op.args[0]), writer.folded(op.args[1]), *rest)
    return _with_weight_sums(writer, op, writer.as_folded, arguments)


def group_norm(writer: Writer, op: Op) -> Result | None:
    x, weight, bias, count = op.args[:4]
    if any(isinstance(each, Wide) and not each.is_shared for each in (weight, bias)):
        return None
    w, b = substitute((weight, bias), lambda wide: wide.node)
    node = writer.call(op.target, writer.folded(x), w, b, count * writer.width, *op.args[4:])
    return each(writer, node, writer.as_folded)


def group_norm_backward(writer: Writer, op: Op) -> Result | None:
    gradient, x, mean, rstd, weight, count, *rest = op.args
    if isinstance(weight, Wide) and not weight.is_shared:
        return None
    batched = (writer.folded(wide) for wide in (gradient, x, mean, rstd))
    own = weight.node if isinstance(weight, Wide) else weight
    return _with_weight_sums(writer, op, writer.as_folded, (*batched, own, count * writer.width, *rest))


# ---- tables


def embedding(writer: Writer, op: Op) -> Result | None:
    table, index = op.args[:2]
    if not table.is_shared:
        return None
    node = writer.call(op.target, table.node, index.node, *op.args[2:])
    return writer.as_folded(node, index.dim) if index.kind is Kind.FOLDED else writer.as_stacked(node)


def embedding_backward(writer: Writer, op: Op) -> Result | None:
    gradient, index, *rest = op.args
    scales_by_count = op.argument(4, False)
    if scales_by_count or not op.sums(op.node) or not index.shape:
        return None
    return writer.as_summed(writer.call(op.target, writer.folded(gradient), writer.folded(index), *rest))


def scatter_rows(writer: Writer, op: Op) -> Result | None:
    """Rows added into zeros, as the gradient of a table that was indexed: all micro-batches add into the same."""
    zeros, indices, values = op.args[:3]
    is_zero = zeros.node.target is aten.full.default and zeros.node.args[1] == 0
    if not (is_zero and op.argument(3, False) and op.sums(op.node)) or any(index is None for index in indices):
        return None
    shapes = {index.shape for index in indices if not index.is_shared}
    if len(shapes) != 1 or any(index.is_shared for index in indices):
        return None
    shape = shapes.pop()
    if not shape or value_of(indices[0].node).dtype is torch.bool or values.shape[: len(shape)] != shape:
        return None
    folded = [writer.folded(index) for index in indices]
    return writer.as_summed(writer.call(op.target, zeros.node, folded, writer.folded(values), True))


def gather(writer: Writer, op: Op) -> Result | None:
    x, dim, index = op.args[:3]
    rank = len(x.shape)
    if len(index.shape) != rank or not rank:
        return None
    dim %= rank
    if dim and x.shape[0] == index.shape[0]:
        args = (writer.folded(x), dim, writer.folded(index), *op.args[3:])
        return writer.as_folded(writer.call(op.target, *args, **op.kwargs))
    args = (writer.stacked(x), dim + 1, writer.stacked(index), *op.args[3:])
    return writer.as_stacked(writer.call(op.target, *args, **op.kwargs))


# ---- attention


def attention(writer: Writer, op: Op) -> Result | None:
    """Each of the batch entries attends to itself; a mask that has no entry for each is the same for all."""
    mask = op.kwargs.get("attn_mask")
    is_for_all = mask is not None and mask.is_shared and (len(mask.shape) < 4 or mask.shape[0] == 1)
    kwargs = dict(op.kwargs)
    if mask is not None:
        kwargs["attn_mask"] = mask.node if is_for_all else writer.folded(mask)
    node = writer.call(op.target, *substitute(op.args, writer.folded), **kwargs)
    return each(writer, node, writer.as_folded)


# ---- losses


def negative_log_likelihood(writer: Writer, op: Op) -> Result | None:
    """The loss of each row; the mean of a micro-batch is divided by the weight of its own rows."""
    scores, labels, weight, reduction, ignored = op.args
    if weight is not None or len(scores.shape) < 2 or scores.dtype in NARROW_FLOATS:
        return None
    x, y = writer.folded(scores), writer.folded(labels)
    losses = writer.call(op.target, x, y, None, _NONE, ignored)
    each_row = writer.call(operator.getitem, losses, 0)
    counted = writer.call(aten._to_copy.default, writer.call(aten.ne.Scalar, y, ignored), dtype=value_of(x).dtype)
    total = writer.call(aten.sum.dim_IntList, _by_micro_batch(writer, counted), [1])
    if reduction == _NONE:
        return writer.as_folded(each_row), writer.as_stacked(total)
    loss = writer.call(aten.sum.dim_IntList, _by_micro_batch(writer, each_row), [1])
    if reduction == _MEAN:
        loss = writer.call(aten.div.Tensor, loss, total)
    return writer.as_stacked(loss), writer.as_stacked(total)


def negative_log_likelihood_backward(writer: Writer, op: Op) -> Result | None:
    gradient, scores, labels, weight, reduction, ignored, total = op.args
    if weight is not None or len(scores.shape) < 2 or scores.dtype in NARROW_FLOATS:
        return None
    x, y = writer.folded(scores), writer.folded(labels)
    unused = writer.call(aten.full.default, [], 1.0, dtype=value_of(x).dtype)
    if reduction == _NONE:
        rows = writer.folded(gradient)
    else:
        scaled = writer.stacked(gradient)
        if reduction == _MEAN:
            scaled = writer.call(aten.div.Tensor, scaled, writer.stacked(total))
        shape = tuple(value_of(y).shape)
        spread = writer.reshaped(scaled, [writer.width, *[1] * len(shape)])
        spread = writer.call(aten.expand.default, spread, [writer.width, shape[0] // writer.width, *shape[1:]])
        rows = writer.reshaped(spread, shape)
    return writer.as_folded(writer.call(op.target, rows, x, y, None, _NONE, ignored, unused))


def _by_micro_batch(writer: Writer, folded: fx.Node) -> fx.Node:
    """All elements of each micro-batch in a row of their own."""
    return writer.reshaped(folded, [writer.width, value_of(folded).numel() // writer.width])


LAYERS: dict[Any, Rule] = {
    aten.mm.default: matrix_product,
    aten.addmm.default: product_with_bias,
    aten.bmm.default: batch_of_products,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten._native_batch_norm_legit_no_training.default: fixed_batch_norm,
    aten.native_batch_norm_backward.default: fixed_batch_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.embedding.default: embedding,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.index_put.default: scatter_rows,
    aten.gather.default: gather,
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention,
    aten.nll_loss_forward.default: negative_log_likelihood,
    aten.nll_loss2d_forward.default: negative_log_likelihood,
    aten.nll_loss_backward.default: negative_log_likelihood_backward,
    aten.nll_loss2d_backward.default: negative_log_likelihood_backward,
}
