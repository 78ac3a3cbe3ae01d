"""Round to float16 at random, up or down, so that the mean of many roundings is the number itself.

In:    a StepGraph.
Out:   if Settings.precision.rounds_at_random: the same graph in which casts to float16 and arithmetic in float16 (sums,
       products, norms, softmax, all element-wise functions) compute in float32, and a random number of the device
       decides which of the two neighbours in float16 each result becomes. Otherwise the graph itself.
Keeps: the types of all results, the signature; what only moves or selects numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.ir import StepGraph, insert, update_value, value_of
from poptorch.ir.ops import as_op
from poptorch.options import Settings

aten = torch.ops.aten
_LOST_BITS = 13  # of the 23 in the mantissa of a float32, float16 keeps 10
_SMALLEST_NORMAL, _SMALLEST = 2.0**-14, 2.0**-24  # of float16

# fmt: off
_ROUNDING = frozenset({
    aten._to_copy, aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv, aten.dot,
    aten.convolution, aten.convolution_backward, aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten.sum, aten.mean, aten.prod, aten.var, aten.var_mean, aten.std, aten.linalg_vector_norm, aten.cumsum,
    aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data,
    aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward,
    aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit_no_training,
    aten.native_batch_norm_backward, aten.avg_pool2d, aten.avg_pool2d_backward, aten._adaptive_avg_pool2d,
    aten._adaptive_avg_pool2d_backward, aten.index_add, aten.scatter_add, aten.embedding_dense_backward,
})
_EXACT = frozenset({
    aten.abs, aten.neg, aten.relu, aten.clamp, aten.clamp_min, aten.clamp_max, aten.maximum, aten.minimum, aten.where,
    aten.masked_fill, aten.threshold_backward, aten.sign, aten.clone, aten.copy, aten.floor, aten.ceil, aten.trunc,
    aten.round, aten.fill,
})
# fmt: on


def round_at_random(graph: StepGraph, settings: Settings) -> StepGraph:
    """Let random numbers decide how results become float16, if that was asked for."""
    if not settings.precision.rounds_at_random or not any(map(_rounds, graph.ops.nodes)):
        return graph
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if _rounds(node):
            _compute_in_float32(ops, node)
    return replace(graph, ops=ops)


def _rounds(node: fx.Node) -> bool:
    """Whether an op computes numbers that need not be in float16, and gives them in float16."""
    op = as_op(node.target)
    if op is None or not any(map(_is_half, _results(node))):
        return False
    packet: Any = op.overloadpacket
    if packet is aten._to_copy:
        return not _is_half(node.all_input_nodes[0])
    return packet in _ROUNDING or (torch.Tag.pointwise in op.tags and packet not in _EXACT)


def _results(node: fx.Node) -> list[fx.Node]:
    return [node] if isinstance(value_of(node), torch.Tensor) else list(node.users)


def _is_half(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype is torch.float16


def _compute_in_float32(ops: fx.Graph, node: fx.Node) -> None:
    results = [result for result in _results(node) if _is_half(result)]
    with ops.inserting_before(node):
        for operand in node.all_input_nodes:
            if _is_half(operand):
                node.replace_input_with(operand, insert(ops, node, aten._to_copy.default, operand, dtype=torch.float32))
    node.args = tuple(map(_wide_type, node.args))
    node.kwargs = {name: _wide_type(argument) for name, argument in node.kwargs.items()}
    update_value(node)
    for result in results:
        if result is not node:
            update_value(result)
        users = list(result.users)
        with ops.inserting_after(result):
            rounded = _rounded(ops, result)
        for user in users:
            user.replace_input_with(result, rounded)


def _wide_type(argument: Any) -> Any:
    """An argument of an op that is to compute in float32, where it is told its type."""
    return torch.float32 if argument is torch.float16 else argument


def _rounded(ops: fx.Graph, wide: fx.Node) -> fx.Node:
    """A float32 value in float16. Numbers between two neighbours become the upper one as often as they are close to it.

    A random number is added to the bits that float16 lacks, and what does not carry is cut off. Numbers below the
    smallest normal one are multiples of the smallest one.
    """
    before = wide.next

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with ops.inserting_before(before):
            return insert(ops, wide, target, *args, **kwargs)

    shape = list(value_of(wide).shape)
    share = call(aten.rand.default, shape, dtype=torch.float32, device=torch.device("cpu"), pin_memory=False)
    noise = call(aten._to_copy.default, call(aten.mul.Tensor, share, 2.0**_LOST_BITS), dtype=torch.int32)
    bits = call(aten.add.Tensor, call(aten.view.dtype, wide, torch.int32), noise)
    normal = call(aten.view.dtype, call(aten.bitwise_and.Scalar, bits, -(2**_LOST_BITS)), torch.float32)
    steps = call(aten.floor.default, call(aten.add.Tensor, call(aten.mul.Tensor, wide, 1 / _SMALLEST), share))
    tiny = call(aten.mul.Tensor, steps, _SMALLEST)
    is_tiny = call(aten.lt.Scalar, call(aten.abs.default, wide), _SMALLEST_NORMAL)
    chosen = call(aten.where.self, is_tiny, tiny, normal)
    return call(aten._to_copy.default, chosen, dtype=torch.float16)
