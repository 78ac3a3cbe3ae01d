"""Tensors of a module are known by whatever way forward comes to them; what cannot be known is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch


class Reaching(nn.Module):
    """A layer whose weight forward also has from elsewhere."""

    def __init__(self, reach) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.reached = [reach(self.fc.weight)]

    def forward(self, x, y):
        return F.mse_loss(self.fc(x) + self.reached[0].sum(), y)


def train(model: nn.Module) -> torch.Tensor:
    return poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))(
        torch.ones(4, 3), torch.ones(4, 2)
    )


def test_a_tensor_computed_from_a_parameter_before_is_refused_with_the_line():
    with pytest.raises(poptorch.Error, match=r"computed from fc\.weight before(?s:.*)self\.reached\[0\]\.sum\(\)"):
        train(Reaching(torch.exp))


def test_a_detached_copy_is_a_constant():
    model = Reaching(lambda weight: weight.detach().exp())
    before = model.reached[0].clone()
    train(model)
    assert torch.equal(model.reached[0], before)


def test_a_view_of_another_type_is_refused_with_the_line():
    with pytest.raises(poptorch.Error, match=r"shares memory with fc\.weight(?s:.*)self\.reached\[0\]\.sum\(\)"):
        train(Reaching(lambda weight: weight.detach().view(torch.int32)))


def test_gradients_that_the_user_has_kept_are_left_alone():
    model = Reaching(lambda weight: weight)
    kept = model.fc.weight.grad = torch.ones(2, 3)
    train(model)
    assert model.fc.weight.grad is kept
    assert torch.equal(kept, torch.ones(2, 3))


def test_objects_that_forward_changes_deep_inside_are_as_before():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.kept = {"a": [{"count": self.count, "last": None}]}

        def forward(self, x):
            self.kept["a"][0]["count"] += 1
            self.kept["a"][0]["last"] = x * 2
            return self.kept["a"][0]["last"]

    model = Deep()
    assert poptorch.inferenceModel(model)(torch.ones(1)).item() == 2
    assert model.kept["a"][0]["count"] is model.count
    assert model.kept["a"][0]["last"] is None


def table(x):
    return HOST.view(2, 2) * 2


def shape(x):
    return HOST.view(2, 2)


def part(x):
    return HOST[1:] + 0


def counted(x):
    return torch.arange(3) + 1


HOST = torch.arange(4.0)


@pytest.mark.inductor
@pytest.mark.parametrize("function", [table, shape, part, counted])
def test_a_result_of_host_tensors_alone_has_values(function, engine):
    class Constant(nn.Module):
        def forward(self, x):
            return x + 1, function(x)

    model = poptorch.inferenceModel(Constant(), poptorch.Options().engine(engine))
    for _ in range(2):
        result = model(torch.ones(2))[1]
        assert type(result) is torch.Tensor
        assert torch.equal(result, function(None).to(result.dtype))
        result.zero_()
    assert torch.equal(HOST, torch.arange(4.0))
