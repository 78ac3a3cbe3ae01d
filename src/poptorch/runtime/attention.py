"""Attention over short sequences as plain matrix products.

PyTorch's kernel works in blocks and never holds all weights of an attention at once; its backward pass computes them
a second time. Where a sequence is one block anyway, batched products are faster, and the weights few enough to keep.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SHORT = 128  # tokens; from twice as many on, PyTorch's kernel is as fast
_FEW_PER_CHANNEL = 4  # tokens per channel of a head, so that the weights take little memory beside queries and keys


def join_attentions(graph: fx.Graph) -> None:
    """Let backward passes of short attentions use their forward passes' weights; the graph is for tracing only."""
    for node in list(graph.nodes):
        if node.target is _BACKWARD and (forward := _forward_of(node)) is not None and _is_short(forward):
            _join(graph, forward, node)


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
    query, key, *_ = (node.meta["val"] for node in attention.all_input_nodes)
    tokens, channels = max(query.shape[2], key.shape[2]), query.shape[3]
    fits = tokens <= min(_SHORT, _FEW_PER_CHANNEL * channels)
    drops_out = len(attention.args) > 3 and attention.args[3] != 0
    return fits and not drops_out and all(n.meta["val"].dtype == torch.float32 for n in attention.all_input_nodes)


def _join(graph: fx.Graph, forward: fx.Node, backward: fx.Node) -> None:
    query, key, value, *options = list[Any](forward.args)
    is_causal = options[1] if len(options) > 1 else False
    mask, scale = forward.kwargs.get("attn_mask"), forward.kwargs.get("scale")
    if scale is None:
        scale = query.meta["val"].shape[-1] ** -0.5
    with graph.inserting_before(forward):
        parts = graph.call_function(attend, (query, key, value, is_causal, mask, scale))
        result, weights = (graph.call_function(operator.getitem, (parts, i)) for i in range(2))
    old_result: Any = backward.args[4]
    with graph.inserting_before(backward):
        operands = (backward.args[0], query, key, value, result, weights, scale)
        gradients = graph.call_function(attend_backward, operands)
    backward.replace_all_uses_with(gradients)
    graph.erase_node(backward)
    old_result.replace_all_uses_with(result)
    graph.eliminate_dead_code()


def attend(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """What the tokens of each head find, and the weights by which they look. Who may look nowhere finds nothing."""
    heads, tokens = query.shape[:2], query.shape[2]
    scores = _products(query, key.mT) * scale
    if mask is not None:
        scores = (scores.unflatten(0, heads) + mask).flatten(0, 1)
    if is_causal:
        position = torch.arange(max(scores.shape[1:]), device=query.device)
        scores = torch.where(position[:tokens, None] >= position[: key.shape[2]], scores, -math.inf)
    largest = scores.amax(-1, keepdim=True)
    powers = (scores - torch.where(largest == -math.inf, 0.0, largest)).exp()
    sums = powers.sum(-1, keepdim=True)
    weights = (powers / torch.where(sums == 0, 1.0, sums)).unflatten(0, heads)
    return _products(weights, value).unflatten(0, heads), weights


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    weights: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    heads = query.shape[:2]
    of_weights = _products(gradient, value.mT).unflatten(0, heads)
    common = (gradient * result).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - common) * scale
    pairs = ((of_scores, key), (of_scores.mT, query), (weights.mT, gradient))
    of_query, of_key, of_value = (_products(a, b).unflatten(0, heads) for a, b in pairs)
    return of_query, of_key, of_value


def _products(a: Tensor, b: Tensor) -> Tensor:
    """One matrix product per head of each sample, with both in one dimension."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1))
