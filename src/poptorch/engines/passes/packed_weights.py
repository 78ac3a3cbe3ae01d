"""Weights in the order in which oneDNN's kernels read them.

In:    a StepGraph, with the names of state that nobody changes between calls.
Out:   the same graph in which convolutions and recurrent layers take packed weights, and ops that pack them, which are
       taken out later because they depend on weights alone. PyTorch's layers bring their weights into that order in
       every call; for one image that takes as long as the convolution itself.
Keeps: every value, the signature.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.engines.host import Host
from poptorch.ir import StepGraph, insert, insert_as, value_of

aten, mkldnn = torch.ops.aten, torch.ops.mkldnn
_IMAGE_DIMS = (4, 5)


def pack_weights(graph: StepGraph, host: Host) -> StepGraph:
    """Let layers take packed weights where those are inputs that stay as they are."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return graph
    ops = graph.copy_ops()
    inputs = [node for node in ops.nodes if node.op == "placeholder"]
    names = [spec.name for spec in graph.signature.inputs]
    fixed = {node for name, node in zip(names, inputs, strict=True) if name in host.fixed and len(node.users) == 1}
    changed = False
    for node in list(ops.nodes):
        if node.target is aten.convolution.default and _is_packable_convolution(node, fixed):
            _pack_convolution(node)
            changed = True
        elif node.target is aten.mkldnn_rnn_layer.default and _is_packable_recurrent(node, fixed):
            _pack_recurrent(node)
            changed = True
    return replace(graph, ops=ops) if changed else graph


def _is_packable_convolution(node: fx.Node, fixed: Collection[fx.Node]) -> bool:
    images, weight, transposed = node.args[0], node.args[1], node.args[6]
    if transposed or weight not in fixed:
        return False
    value: torch.Tensor = value_of(images)  # pyright: ignore
    return value.dtype is torch.float32 and value.dim() in _IMAGE_DIMS and value.numel() > 0


def _pack_convolution(node: fx.Node) -> None:
    arguments: Any = node.args
    images, weight, bias, stride, padding, dilation, _, _, groups = arguments
    shape = list(value_of(images).shape)
    with node.graph.inserting_before(node):
        reorder = (mkldnn._reorder_convolution_weight.default, weight, padding, stride, dilation, groups, shape)
        packed = insert_as(node.graph, node, value_of(weight), *reorder)
        rest = (bias, padding, stride, dilation, groups, "none", [], "")  # and nothing after it
        convolution = insert(node.graph, node, mkldnn._convolution_pointwise.default, images, packed, *rest)
    node.replace_all_uses_with(convolution)
    node.graph.erase_node(node)


def _is_packable_recurrent(node: fx.Node, fixed: Collection[fx.Node]) -> bool:
    sequence, of_input, of_hidden = node.args[:3]
    keeps_work_for_backward = node.args[15]
    is_float = value_of(sequence).dtype is torch.float32  # pyright: ignore
    return is_float and not keeps_work_for_backward and of_input in fixed and of_hidden in fixed


def _pack_recurrent(node: fx.Node) -> None:
    """The layer itself takes either form of weights."""
    arguments: Any = node.args
    sequence, of_input, of_hidden = arguments[:3]
    reverse, _, _, hidden, _, has_biases, _, batch_first, _ = arguments[7:]
    shape = list(value_of(sequence).shape)
    reorder = mkldnn._reorder_mkldnn_rnn_layer_weight.default
    with node.graph.inserting_before(node):
        values = (value_of(of_input), value_of(of_hidden))
        facts = (hidden, reverse, has_biases, batch_first, shape)
        both = insert_as(node.graph, node, values, reorder, of_input, of_hidden, *facts)
        packed = [insert(node.graph, node, operator.getitem, both, index) for index in range(2)]
    node.args = (sequence, *packed, *arguments[3:])
