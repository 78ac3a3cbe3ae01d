"""Add the bias of a product where the product is read next.

PyTorch fills the result with copies of the bias first, and the product then adds to them. Code that is generated for
the next op can as well add the bias itself, as it reads. Where another of PyTorch's kernels comes next, that would take
one more walk over the product.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims

from poptorch.executable import is_view

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


def add_biases_last(graph: fx.Graph) -> None:
    """Separate biases from products that generated code reads; the graph is for tracing only."""
    for node in graph.nodes:
        if node.target is _PRODUCT and not node.kwargs and _has_plain_bias(node) and _is_read_by_code(node):
            node.target = add_bias_last


def _has_plain_bias(product: fx.Node) -> bool:
    bias = product.args[0]
    return isinstance(bias, fx.Node) and bias.meta["val"].dim() == 1


def _is_read_by_code(node: fx.Node) -> bool:
    """Whether any reader of a value, or of a view of it, is an op that code is generated for."""
    views = [user for user in node.users if is_view(user) or user.target is operator.getitem]
    readers = [user for user in node.users if user not in views and user.op == "call_function"]
    return any(user.target not in _KERNELS for user in readers) or any(map(_is_read_by_code, views))


def add_bias_last(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A product, and after it the bias."""
    product = a @ b
    return inductor_prims.force_stride_order(product, product.stride()) + bias  # Inductor would join them again
