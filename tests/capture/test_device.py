"""Programs that name the device "ipu" inside `forward` mean the device of the program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from models import Apply


def in_context(x):
    with torch.device("ipu"):
        return x + torch.ones(2)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x + torch.ones(2, device="ipu"),
        lambda x: x + torch.tensor([1.0, 1.0], device=torch.device("ipu")),
        lambda x: x.to("ipu") + 1,
        lambda x: x.to("ipu:0", torch.float32) + 1,
        lambda x: x.to(device=torch.device("ipu", 3)) + 1,
        lambda x: x + torch.ones_like(x, device="ipu"),
        lambda x: x.new_full((2,), 1.0, device="ipu") + x,
        in_context,
    ],
)
def test_device_ipu_is_the_device_of_the_program(forward):
    result = poptorch.inferenceModel(Apply(forward))(torch.zeros(2))
    assert result.tolist() == [1, 1]
    assert result.device.type == "cpu"


def test_submodule_can_be_moved_to_the_ipu_in_forward():
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x):
            return self.fc.to("ipu")(x.to("ipu"))

    model = Moving()
    x = torch.randn(3, 2)
    assert torch.equal(poptorch.inferenceModel(model)(x), model.fc(x))


def test_a_text_that_looks_like_the_device_elsewhere_is_left_alone():
    model = poptorch.inferenceModel(Apply(lambda x: torch.einsum("ipu", x)))
    assert model(torch.ones(1, 2, 3)).shape == (1, 2, 3)
