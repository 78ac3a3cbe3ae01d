"""What happens to gradients between the backward pass and the update rules, as pure functions that can be traced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poptorch.errors import OptimizerError, explain

# Automatic loss scaling looks at the largest gradients. Above this size they come near the end of float16, 65504.
_LARGE = 0.125 * 65504
_TOLERATED_SHARE = 1e-7  # of all elements that may be large
_FACTOR_LIMITS = (2.0**-24, 2.0**24)
_CAREFUL = 2.0**12  # a loss scale from which on it grows slowly
_SLOW_GROWTH = 2.0 ** (1 / 256)


@dataclass(frozen=True)
class Clipping:
    """Limits on the reduced gradients of all parameters, before any optimiser sees them; None: no limit."""

    max_norm: float | None = None
    norm_type: float = 2.0
    max_value: float | None = None

    def apply(self, grads: list[Tensor]) -> list[Tensor]:
        """As `torch.nn.utils.clip_grad_value_`, then as `torch.nn.utils.clip_grad_norm_`."""
        if self.max_value is not None:
            if any(grad.is_complex() for grad in grads):
                raise OptimizerError(
                    explain(
                        "gradients of complex parameters have no order, so clipGradValue cannot limit them.",
                        options=f"Training.clipGradValue({self.max_value:g})",
                        fix="use Training.clipGradNorm, or parameters that are real",
                    )
                )
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
    sizes = [grad.abs() if grad.is_complex() else grad for grad in grads]
    norms = torch.stack([torch.linalg.vector_norm(size, norm_type, dtype=torch.float32) for size in sizes])
    return torch.linalg.vector_norm(norms, norm_type)


def adapt_scale(grads: Sequence[Tensor], scaling: Tensor, factor: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Whether the scaled gradients are usable, and the factor of the loss scaling for the next update.

    The factor grows as long as the gradients are far from the end of float16 and halves when they come near it. If
    they went over it the update must be skipped. Gradients of parameters do not tell how near those of activations are
    to the end; so the factor doubles while the whole scale is small, and then grows slowly, or it would go over the end
    in every second update. It stays where it is if the scale would exceed `largest`, the end of the type of the loss.
    """
    sizes = [grad.detach().abs().float() for grad in grads]
    # Native code may have a gradient in more digits than its type; what that type cannot hold counts as infinite.
    limits = [torch.finfo(grad.dtype).max for grad in grads]
    fits = torch.stack([(size <= limit).all() for size, limit in zip(sizes, limits, strict=True)]).all()
    large = torch.stack([(size > _LARGE).sum(dtype=torch.float32) for size in sizes]).sum()
    count = sum(size.numel() for size in sizes)
    grows = fits & (large <= _TOLERATED_SHARE * count)
    scale = scaling.double() * factor
    growth = torch.where(scale < _CAREFUL, 2.0, _SLOW_GROWTH)
    grown = torch.where(scale * growth <= largest, factor * growth, factor)
    return fits, torch.where(grows, grown, factor / 2).to(factor.dtype).clamp(*_FACTOR_LIMITS)


def check_scaling(scaling: float, loss_type: torch.dtype) -> None:
    """Raise if the gradient that starts at the loss cannot be this number."""
    limits = torch.finfo(loss_type)
    if not limits.tiny <= scaling <= limits.max:
        raise OptimizerError(
            explain(
                f"loss_scaling is {scaling:g}, but the loss is {loss_type}, which holds numbers from "
                f"{limits.tiny:.2g} to {limits.max:g}: gradients start as this number.",
                fix="choose another loss_scaling, or compute the loss in float32",
            )
        )
