"""Attention over short sequences is computed as plain products, with the same results."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from poptorch.engines.passes.attention import attend, attend_backward, join_attentions
from rewrites import changes, train_once

aten = torch.ops.aten
SAMPLES, HEADS, CHANNELS = 2, 3, 8


def heads(tokens: int, seed: int, count: int = HEADS) -> torch.Tensor:
    """Values of tokens, in the memory layout in which projections give them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, tokens, count, CHANNELS, generator=generator, dtype=torch.float64).transpose(1, 2)


def padding(tokens: int, others: int) -> torch.Tensor:
    """A mask that hides the last others, and everything from the first token of the second sample."""
    mask = torch.zeros(SAMPLES, 1, tokens, others, dtype=torch.float64)
    mask[..., -2:] = -math.inf
    mask[1, :, 0] = -math.inf
    return mask


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("others", [5, 7], ids=["self", "cross"])
@pytest.mark.parametrize("kind", ["all", "causal", "masked", "bias"])
@pytest.mark.parametrize("shared", [1, 2], ids=["", "shared"])
def test_results_and_gradients(kind, others, scale, shared):
    query, gradient = heads(5, 1, shared * HEADS), heads(5, 4, shared * HEADS)
    key, value = heads(others, 2), heads(others, 3)
    masks = {"masked": padding(5, others), "bias": torch.randn(5, others, dtype=torch.float64)}
    mask, is_causal = masks.get(kind), kind == "causal"
    number = CHANNELS**-0.5 if scale is None else scale
    result, kept = attend(query, key, value, is_causal, mask, number)
    found = attend_backward(gradient, kept, number, HEADS, HEADS)
    options = {"attn_mask": mask, "scale": scale}
    expected, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, **options)
    torch.testing.assert_close(result, expected)
    operands = (gradient, query, key, value, expected, sums, 0.0, is_causal)
    for ours, theirs in zip(
        found, aten._scaled_dot_product_flash_attention_for_cpu_backward(*operands, **options), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


class Attention(nn.Module):
    """Self-attention with a mask, and a loss."""

    def __init__(self, channels: int = CHANNELS, shared: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(4, (shared + 2) * HEADS * channels)
        self.counts = (shared * HEADS, HEADS, HEADS)

    def forward(self, x, mask=None):
        heads = self.project(x).unflatten(-1, (sum(self.counts), -1)).transpose(1, 2)
        q, k, v = heads.split(self.counts, 1)
        options = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": len(set(self.counts)) > 1}
        y = F.scaled_dot_product_attention(q, k, v, **options)
        return y, poptorch.identity_loss(y.square().sum(), reduction="none")


def is_joined(executor) -> bool:
    return changes(executor, join_attentions)


@pytest.mark.inductor
@pytest.mark.parametrize("shared", [1, 2], ids=["", "shared"])
def test_training(engine, shared):
    batch = (torch.randn(SAMPLES, 5, 4), padding(5, 5).float())
    model, reference = Attention(shared=shared), Attention(shared=shared)
    executor, (y, _) = train_once(model, engine, *batch)
    expected, loss = reference(*batch)
    loss.backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert is_joined(executor)
    torch.testing.assert_close(y, expected.detach())
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tokens_that_are_queries_keys_and_values_at_once():
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.randn(1, 1, 5, 4))

        def forward(self):
            return poptorch.identity_loss(F.scaled_dot_product_attention(*(self.x * 2,) * 3).sum(), reduction="none")

    assert is_joined(train_once(Same(), "eager")[0])


@pytest.mark.parametrize(("tokens", "channels"), [(97, 64), (40, 8)], ids=["long", "long beside its channels"])
def test_long_sequences_are_left_to_pytorch(tokens, channels):
    executor, _ = train_once(Attention(channels), "eager", torch.randn(SAMPLES, tokens, 4))
    assert not is_joined(executor)
