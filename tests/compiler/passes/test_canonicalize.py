"""The plain form of a graph computes what the user wrote."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch


class ScaledSums(nn.Module):
    """Sums with a factor: of a matrix product and what is added to it, on either side and in other types."""

    def forward(self, x, w, b, half):
        y = x @ w
        return torch.add(y, b, alpha=2.0), torch.add(b, y, alpha=3.0), torch.add(y, half, alpha=0.3)


@pytest.mark.inductor
def test_a_factor_of_a_sum_is_kept(engine):
    """Inductor leaves it out when it joins a sum to a matrix product."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in ((4, 3), (3, 2), (4, 2))]
    inputs.append(inputs[-1].half())
    model = ScaledSums()
    made = poptorch.Options().engine(engine)
    made.Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat)
    torch.testing.assert_close(poptorch.inferenceModel(model, made)(*inputs), model(*inputs))
