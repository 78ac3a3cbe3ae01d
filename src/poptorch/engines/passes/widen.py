"""Compute products of 16-bit floats in float32.

In:    a StepGraph.
Out:   the same graph in which matrix products, convolutions and attention over float16 or bfloat16 get their operands
       as float32, and give results that are rounded back. What is kept in memory stays 16 bits wide, and sums are
       float32, as on the device. CPUs without 16-bit arithmetic take tens of times longer for the original ops.
       Products that share an operand, or views of one, share its cast: the weights of a recurrent layer are widened
       once and not for every time step. What the forward pass computed is widened anew in the backward pass, so that
       only the 16-bit form is kept between them.
Keeps: every value up to rounding, the signature.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from poptorch.engines.host import Host, in_bodies_too
from poptorch.ir import Direction, StepGraph, insert, note_of, update_value, value_of
from poptorch.ir.ops import memory_owner

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
_WHOLE_VIEWS = frozenset(
    {
        aten.view.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.expand.default,
    }
)  # that show every element; to widen what they show costs no more than to widen them


@in_bodies_too
def widen_products(graph: StepGraph, host: Host) -> StepGraph:
    """Put casts around every product of 16-bit floats."""
    if not any(_is_narrow_product(node) for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    operands = _WideOperands(ops)
    for node in list(ops.nodes):
        if _is_narrow_product(node):
            _widen(ops, node, operands)
    return replace(graph, ops=ops)


def _is_narrow_product(node: fx.Node) -> bool:
    return node.target in _PRODUCTS and any(_is_narrow(operand) for operand in node.all_input_nodes)


def _is_narrow(node: fx.Node) -> bool:
    return isinstance(value := node.meta.get("val"), torch.Tensor) and value.dtype in _NARROW


@dataclass(frozen=True)
class _WideOperands:
    """The float32 forms of 16-bit values so far, for each direction; the backward pass uses those of inputs."""

    graph: fx.Graph
    found: dict[tuple[fx.Node, Direction | None], fx.Node] = field(default_factory=dict[Any, fx.Node])

    def of(self, value: fx.Node, product: fx.Node) -> fx.Node:
        """The wide form of an operand of a product, which is made before the first product that needs it."""
        note = note_of(product)
        direction = None if note is None else note.direction
        if direction is Direction.BACKWARD and memory_owner(value).op == "placeholder":
            direction = Direction.FORWARD
        if (value, direction) not in self.found:
            self.found[value, direction] = self._make(value, product)
        return self.found[value, direction]

    def _make(self, value: fx.Node, product: fx.Node) -> fx.Node:
        if value.target not in _WHOLE_VIEWS:
            return _cast(self.graph, product, value, torch.float32)
        shown, *arguments = value.args
        assert isinstance(shown, fx.Node)
        return insert(self.graph, product, value.target, self.of(shown, product), *arguments)


def _widen(graph: fx.Graph, product: fx.Node, operands: _WideOperands) -> None:
    """Cast the operands, and every result to the type that it had."""
    results = [product] if isinstance(value_of(product), torch.Tensor) else list(product.users)
    narrow = [(result, value_of(result).dtype) for result in results if _is_narrow(result)]
    with graph.inserting_before(product):
        for operand in product.all_input_nodes:
            if _is_narrow(operand):
                product.replace_input_with(operand, operands.of(operand, product))
    update_value(product)
    for result, dtype in narrow:
        if result is not product:
            update_value(result)
        with graph.inserting_after(result):
            rounded = _cast(graph, product, result, dtype)
        result.replace_all_uses_with(rounded, delete_user_cb=lambda user, rounded=rounded: user is not rounded)


def _cast(graph: fx.Graph, product: fx.Node, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    return insert(graph, product, aten._to_copy.default, value, dtype=dtype)
