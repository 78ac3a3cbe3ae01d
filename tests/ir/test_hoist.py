"""What depends on weights alone is computed once per set of weights, not once per batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch


def infer(module: nn.Module) -> poptorch.PoplarExecutor:
    return poptorch.inferenceModel(module, poptorch.Options().engine("eager"))


def ops(program) -> list[str]:
    return [node.target.name().split("::")[1] for node in program.graph.ops.nodes if node.op == "call_function"]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.tensor([[2.0], [3.0]]))

    def forward(self, x):
        return x @ (self.weight * self.scale.exp()).t()


def test_weight_arithmetic_moves_to_the_preparation():
    module = Scaled()
    executor, x = infer(module), torch.randn(4, 3)
    torch.testing.assert_close(executor(x), module(x).detach())
    assert ops(executor._executable.prepare) == ["exp", "mul.Tensor"]
    assert ops(executor._executable.step) == ["t", "mm"]


def test_views_of_weights_stay_in_the_step():
    executor = infer(nn.Linear(3, 2))
    executor(torch.ones(1, 3))
    assert executor._executable.prepare is None


def test_random_numbers_are_drawn_for_every_batch():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x + torch.rand_like(self.weight)

    executor = infer(Noisy())
    assert not torch.equal(executor(torch.zeros(3)), executor(torch.zeros(3)))


def test_training_computes_with_the_weights_of_each_step():
    module = Scaled()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x):
            return poptorch.identity_loss(self.inner(x), "sum")

    model = Loss()
    executor = poptorch.trainingModel(
        model, poptorch.Options().engine("eager"), torch.optim.SGD(model.parameters(), lr=0.01)
    )
    first, second = executor(torch.ones(1, 3)), executor(torch.ones(1, 3))
    assert executor._executable.prepare is None
    assert second < first


@pytest.mark.inductor
def test_a_result_that_is_computed_once_may_be_changed(engine):
    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self, x):
            doubled = self.weight * 2
            return doubled, doubled.t(), x @ doubled.t()

    executor = poptorch.inferenceModel(Shown(), poptorch.Options().engine(engine))
    for _ in range(3):
        results = executor(torch.ones(1, 3))
        expected = (torch.full((2, 3), 2.0), torch.full((3, 2), 2.0), torch.full((1, 2), 6.0))
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value)
            result.zero_()
