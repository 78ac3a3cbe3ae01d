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


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 200)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.fc(x), labels)


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32], ids=str)
def test_labels_of_other_integer_types(dtype, engine):
    """A label of 156 is not taken for the -100 that is ignored, which has the same eight bits."""
    model, x, labels = Classifier(), torch.randn(3, 4), torch.tensor([1, 156, 199])
    expected = model(x, labels).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = poptorch.trainingModel(model, poptorch.Options().engine(engine), optimizer)(x, labels.to(dtype))
    torch.testing.assert_close(loss, expected)
