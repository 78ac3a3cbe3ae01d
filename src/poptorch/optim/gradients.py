"""What happens to gradients between the backward pass and the update rules, as pure functions that can be traced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Automatic loss scaling looks at the largest gradients. Above this size they come near the end of float16, 65504.
_LARGE = 0.125 * 65504
_TOLERATED_SHARE = 1e-7  # of all elements that may be large
_FACTOR_LIMITS = (2.0**-24, 2.0**24)


@dataclass(frozen=True)
class Clipping:
    """Limits on the reduced gradients of all parameters, before any optimiser sees them; None: no limit."""

    max_norm: float | None = None
    norm_type: float = 2.0
    max_value: float | None = None

    def apply(self, grads: list[Tensor]) -> list[Tensor]:
        """As `torch.nn.utils.clip_grad_value_`, then as `torch.nn.utils.clip_grad_norm_`."""
        if self.max_value is not None:
            grads = [grad.clamp(-self.max_value, self.max_value) for grad in grads]
        if self.max_norm is not None:
            coefficient = (self.max_norm / (_total_norm(grads, self.norm_type) + 1e-6)).clamp(max=1.0)
            grads = [grad * coefficient.to(grad.dtype) for grad in grads]
        return grads


def limit_norm(grads: list[Tensor], max_norm: float) -> list[Tensor]:
    """PopTorch's `max_grad_norm`: scale all gradients so that their common norm is at most this."""
    if math.isinf(max_norm):
        return grads
    coefficient = max_norm / _total_norm(grads, 2.0).clamp(min=max_norm)
    return [grad * coefficient.to(grad.dtype) for grad in grads]


def _total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    norms = torch.stack([torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32) for grad in grads])
    return torch.linalg.vector_norm(norms, norm_type)


def adapt_scale(grads: Sequence[Tensor], factor: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the scaled gradients are usable, and the factor of the loss scale for the next update.

    The factor doubles as long as the gradients are far from the end of float16 and halves when they come near it. If
    they went over it the update must be skipped.
    """
    sizes = [grad.detach().abs().float() for grad in grads]
    finite = torch.stack([torch.isfinite(size).all() for size in sizes]).all()
    large = torch.stack([(size > _LARGE).sum(dtype=torch.float32) for size in sizes]).sum()
    count = sum(size.numel() for size in sizes)
    grows = finite & (large <= _TOLERATED_SHARE * count)
    return finite, torch.where(grows, factor * 2, factor / 2).clamp(*_FACTOR_LIMITS)
