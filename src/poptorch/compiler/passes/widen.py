"""Compute products of 16-bit floats in float32.

In:    a StepGraph.
Out:   the same graph in which matrix products, convolutions and attention over float16 or bfloat16 get their operands
       as float32, and give results that are rounded back. What is kept in memory stays 16 bits wide, and sums are
       float32, as on the device. CPUs without 16-bit arithmetic take tens of times longer for the original ops.
Keeps: every value up to rounding, the signature.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from poptorch.compiler.passes.rewrite import insert, update_value
from poptorch.ir import StepGraph, value_of
from poptorch.options import Settings

aten = torch.ops.aten
_NARROW = frozenset({torch.float16, torch.bfloat16})
_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.addbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.vdot.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)


def widen_products(graph: StepGraph, settings: Settings) -> StepGraph:
    """Put casts around every product of 16-bit floats."""
    if not any(_is_narrow_product(node) for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if _is_narrow_product(node):
            _widen(ops, node)
    return replace(graph, ops=ops)


def _is_narrow_product(node: fx.Node) -> bool:
    return node.target in _PRODUCTS and any(_is_narrow(operand) for operand in node.all_input_nodes)


def _is_narrow(node: fx.Node) -> bool:
    return isinstance(value := node.meta.get("val"), torch.Tensor) and value.dtype in _NARROW


def _widen(graph: fx.Graph, product: fx.Node) -> None:
    """Cast the operands, and every result to the type that it had."""
    results = [product] if isinstance(value_of(product), torch.Tensor) else list(product.users)
    narrow = [(result, value_of(result).dtype) for result in results if _is_narrow(result)]
    with graph.inserting_before(product):
        for operand in product.all_input_nodes:
            if _is_narrow(operand):
                product.replace_input_with(operand, _cast(graph, product, operand, torch.float32))
    update_value(product)
    for result, dtype in narrow:
        if result is not product:
            update_value(result)
        with graph.inserting_after(result):
            rounded = _cast(graph, product, result, dtype)
        result.replace_all_uses_with(rounded, delete_user_cb=lambda user, rounded=rounded: user is not rounded)


def _cast(graph: fx.Graph, product: fx.Node, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    return insert(graph, product, aten._to_copy.default, value, dtype=dtype)
