"""Which values of a training step are only needed as their sum over all micro-batches.

The gradients of parameters are, and so is what leads to them by ops that are linear in it. Such values never have to
exist for a single micro-batch: a product whose rows are those of all micro-batches gives the sum right away.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from poptorch.compiler.wide.values import NARROW_FLOATS
from poptorch.ir import OutputRole, OutputSpec, StepGraph, is_update, value_of

aten = torch.ops.aten

_UNARY = frozenset(
    {
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.clone.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.neg.default,
        aten.sum.dim_IntList,
        aten.select_backward.default,
        aten.slice_backward.default,
    }
)
_SCALED = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})


def only_summed(graph: StepGraph, gradients: Collection[fx.Node]) -> frozenset[fx.Node]:
    """The nodes of which nobody needs more than the sum; `gradients` are those that the update uses."""
    returned = {node for spec, node in graph.outputs if node not in gradients or not _is_gradient(spec)}
    found: set[fx.Node] = set()
    for node in reversed(graph.ops.nodes):
        if node.op != "call_function" or is_update(node) or node in returned or not _adds_up(value_of(node)):
            continue
        users = [user for user in node.users if not is_update(user) and user.op != "output"]
        if (users or node in gradients) and all(user in found and is_linear(user) for user in users):
            found.add(node)
    return frozenset(found)


def is_linear(node: fx.Node) -> bool:
    """Whether an op of the sum is the sum of the op."""
    if node.target in _UNARY:
        return node.kwargs.get("dtype") is None
    if node.target in _SCALED:
        return isinstance(node.args[1], (int, float)) and not node.kwargs
    if node.target is aten._to_copy.default:
        return set(node.kwargs) == {"dtype"} and _adds_up(value_of(node))
    if node.target is aten.add.Tensor and not node.kwargs:
        shapes = {value_of(arg).shape if isinstance(arg, fx.Node) else None for arg in node.args}
        return shapes == {value_of(node).shape}
    return False


def _adds_up(value: Any) -> bool:
    """Whether a sum over micro-batches fits into the type of the parts: one of 16-bit floats may not."""
    is_number = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return is_number and value.dtype not in NARROW_FLOATS


def _is_gradient(spec: OutputSpec) -> bool:
    return spec.role is OutputRole.GRADIENT
