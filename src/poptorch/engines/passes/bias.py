"""Add the bias of a product where the product is read next.

In:    a StepGraph.
Out:   the same graph in which a product with a bias that generated code reads is a plain product and an addition.
       PyTorch fills the result with copies of the bias first, and the product then adds to them; generated code adds
       the bias as it reads. Where another of PyTorch's kernels comes next, that would take one more walk.
Keeps: every value up to rounding, the signature.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import Tensor, fx

from poptorch.engines.host import Host
from poptorch.engines.private import inductor_prims
from poptorch.ir import StepGraph, value_of
from poptorch.ir.inline import inline
from poptorch.ir.ops import is_view

aten = torch.ops.aten
_PRODUCT = aten.addmm.default
_KERNELS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def add_biases_last(graph: StepGraph, host: Host) -> StepGraph:
    """Separate biases from products that generated code reads."""
    if not any(_matches(node) for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if _matches(node):
            with ops.inserting_before(node):
                node.replace_all_uses_with(inline(ops, node, add_bias_last, *node.args))
            ops.erase_node(node)
    return replace(graph, ops=ops)


def _matches(node: fx.Node) -> bool:
    return node.target is _PRODUCT and not node.kwargs and _has_plain_bias(node) and _is_read_by_code(node)


def _has_plain_bias(product: fx.Node) -> bool:
    bias = product.args[0]
    return isinstance(bias, fx.Node) and value_of(bias).dim() == 1


def _is_read_by_code(node: fx.Node) -> bool:
    """Whether any reader of a value, or of a view of it, is an op that code is generated for."""
    views = [user for user in node.users if is_view(user) or user.target is operator.getitem]
    readers = [user for user in node.users if user not in views and user.op == "call_function"]
    return any(user.target not in _KERNELS for user in readers) or any(map(_is_read_by_code, views))


def add_bias_last(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A product, and after it the bias."""
    product = a @ b
    return inductor_prims.force_stride_order(product, product.stride()) + bias  # Inductor would join them again
