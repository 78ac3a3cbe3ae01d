"""Operands of a type that PyTorch refuses end in an error with PyTorch's reason and the line, before anything runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Apply

WHOLE, IMAGES, FLAGS = torch.ones(2, 3, dtype=torch.int64), torch.ones(1, 3, 4, 4).byte(), torch.ones(3).bool()
REFUSED = {
    "a linear layer of integers": (nn.Linear(3, 2), WHOLE),
    "a convolution of bytes": (nn.Conv2d(3, 2, 3), IMAGES),
    "a recurrent cell of integers": (nn.GRUCell(3, 3), WHOLE),
    "softmax of integers": (lambda x: x.softmax(-1), WHOLE),
    "gelu of integers": (F.gelu, WHOLE),
    "variance of integers": (torch.var, WHOLE),
    "a loss of integers": (lambda x: F.mse_loss(x, x), WHOLE),
    "the difference of flags": (lambda x: x - x, FLAGS),
    "rows to add of another type": (lambda x: torch.zeros(2, 3).index_add(0, torch.tensor([0, 1]), x), WHOLE),
    "an index that is no integer": (lambda x: torch.ones(3).index_select(0, x.float()), torch.tensor([1])),
    "bits of floats": (lambda x: x.float() & x.float(), WHOLE),
    "integers times a fraction in place": (lambda x: x.clone().mul_(0.5), WHOLE),
    "integers divided in place": (lambda x: x.clone().div_(2), WHOLE),
}
ACCEPTED = {
    "a product of integers": (lambda x: x @ x.T, WHOLE),
    "flags counted in place": (lambda x: torch.zeros(3).add_(x), FLAGS),
    "integers divided without a rest": (lambda x: (x * 3).div_(2, rounding_mode="floor"), WHOLE),
    "rows to add": (lambda x: torch.zeros(2, 3).index_add(0, torch.tensor([0, 1]), x.float()), WHOLE),
    "the mean of small images": (lambda x: F.interpolate(x, scale_factor=2), IMAGES),
}


class Refusing(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return poptorch.identity_loss(self.function(x).sum() * self.weight, reduction="none")


@pytest.mark.parametrize("name", REFUSED)
def test_types_that_pytorch_refuses_are_refused_with_the_line(name):
    function, x = REFUSED[name]
    with pytest.raises((RuntimeError, NotImplementedError)):
        function(x)
    model = Refusing(function)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match=r"where: +test_operand_types\.py:\d+"):
        training(x)
    assert not training.isCompiled()


@pytest.mark.parametrize("name", ACCEPTED)
def test_types_that_pytorch_accepts_give_its_results(name):
    function, x = ACCEPTED[name]
    torch.testing.assert_close(poptorch.inferenceModel(Apply(function))(x), function(x), check_dtype=False)
