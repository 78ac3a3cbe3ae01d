"""Attention over short sequences as plain matrix products.

In:    a training StepGraph.
Out:   the same graph in which attentions over few tokens, with their backward passes, are batched products. PyTorch's
       kernel works in blocks and never holds all weights of an attention at once; its backward pass computes them a
       second time. Where a sequence is one block anyway products are faster, and the weights few enough to keep.
Keeps: every value up to rounding, the signature.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from poptorch.engines.host import Host
from poptorch.ir import StepGraph, value_of
from poptorch.ir.inline import inline

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SHORT = 96  # tokens; with more, the weights of all layers would raise the peak of memory above that of PyTorch
_FEW_PER_CHANNEL = 4  # tokens per channel of a head, so that the weights take little memory beside queries and keys


def join_attentions(graph: StepGraph, host: Host) -> StepGraph:
    """Let backward passes of short attentions use their forward passes' weights."""
    if not any(_matches(node) for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if _matches(node):
            _join(ops, node)
    ops.eliminate_dead_code()
    return replace(graph, ops=ops)


def _matches(node: fx.Node) -> bool:
    return node.target is _BACKWARD and (forward := _forward_of(node)) is not None and _is_short(forward)


def _forward_of(backward: fx.Node) -> fx.Node | None:
    """The attention whose result a backward pass belongs to, if nobody else looks at the sums that it keeps."""
    result, sums = backward.args[4:6]
    assert isinstance(result, fx.Node)
    assert isinstance(sums, fx.Node)
    forward = sums.args[0]
    if not isinstance(forward, fx.Node) or forward.target is not _ATTENTION or len(sums.users) > 1:
        return None
    return forward if (result.target, result.args) == (operator.getitem, (forward, 0)) else None


def _is_short(attention: fx.Node) -> bool:
    query, key = (value_of(node) for node in list[Any](attention.args)[:2])
    tokens, channels = max(query.shape[2], key.shape[2]), query.shape[3]
    fits = tokens <= min(_SHORT, _FEW_PER_CHANNEL * channels)
    drops_out = len(attention.args) > 3 and attention.args[3] != 0
    return fits and not drops_out and all(value_of(n).dtype == torch.float32 for n in attention.all_input_nodes)


def _join(graph: fx.Graph, backward: fx.Node) -> None:
    forward = _forward_of(backward)
    assert forward is not None
    query, key, value, *options = list[Any](forward.args)
    is_causal = options[1] if len(options) > 1 else False
    mask, scale = forward.kwargs.get("attn_mask"), forward.kwargs.get("scale")
    if scale is None:
        scale = value_of(query).shape[-1] ** -0.5
    with graph.inserting_before(forward):
        result, kept = inline(graph, forward, attend, query, key, value, is_causal, mask, scale)
    old_result: Any = backward.args[4]
    with graph.inserting_before(backward):
        few = [value_of(tensor).shape[1] for tensor in (key, value)]
        gradients = inline(graph, backward, attend_backward, backward.args[0], kept, scale, *few)
    for user in list(backward.users):
        user.replace_all_uses_with(gradients[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(backward)
    old_result.replace_all_uses_with(result)


def attend(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The result of an attention, and what its backward pass needs.

    A token whose mask hides all others gets zeros. Several heads in a row may share one of the keys or values.
    """
    heads = query.shape[:2]
    key, value = (_repeat_shared(tensor, heads[1]) for tensor in (key, value))
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))  # one product per head
    scores = torch.bmm(query, key.mT) * scale
    if mask is not None:
        scores = (scores.unflatten(0, heads) + mask).flatten(0, 1)
    if is_causal:
        tokens, others = scores.shape[1:]
        position = torch.arange(max(tokens, others), device=query.device)
        scores = torch.where(position[:tokens, None] >= position[:others], scores, -math.inf)
    largest = scores.amax(-1, keepdim=True)
    powers = (scores - torch.where(largest == -math.inf, 0.0, largest)).exp()
    sums = powers.sum(-1, keepdim=True)
    weights = powers / torch.where(sums == 0, 1.0, sums)
    return torch.bmm(weights, value).unflatten(0, heads), (weights, query, key, value)


def _repeat_shared(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def attend_backward(
    gradient: Tensor, kept: tuple[Tensor, ...], scale: float, key_heads: int, value_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, of which there may be fewer heads."""
    weights, query, key, value = kept
    heads = gradient.shape[:2]
    gradient = gradient.flatten(0, 1)
    of_weights = torch.bmm(gradient, value.mT)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
    pairs = ((of_scores, key), (of_scores.mT, query), (weights.mT, gradient))
    of_query, of_key, of_value = (torch.bmm(a, b).unflatten(0, heads) for a, b in pairs)
    return of_query, _sum_shared(of_key, key_heads), _sum_shared(of_value, value_heads)


def _sum_shared(gradient: Tensor, heads: int) -> Tensor:
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)
