"""What depends on weights alone is computed when they are taken over; the rest of the program is as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from poptorch.engines.passes.draw_ahead import DRAWS, draw_ahead
from poptorch.engines.passes.prepare import PREPARE, prepare_weights
from poptorch.engines.passes.widen import widen_products
from rewrites import after


class Dropping(nn.Module):
    """Draws random numbers, and has weights that the inductor engine keeps in another form."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5).half()

    def forward(self, x):
        return nn.functional.dropout(self.fc(x), 0.5)


def dropping(engine: str) -> poptorch.PoplarExecutor:
    torch.manual_seed(0)
    return poptorch.inferenceModel(Dropping(), poptorch.Options().engine(engine).randomSeed(7))


def test_the_draws_of_a_program_stay():
    executor = dropping("eager")
    executor(torch.ones(4, 6).half())
    assert set(after(executor, widen_products, draw_ahead, prepare_weights).graphs) == {DRAWS, PREPARE}


@pytest.mark.inductor
def test_a_program_may_draw_and_prepare_its_weights(engine):
    x = torch.ones(4, 6).half()
    expected, found = dropping("eager"), dropping(engine)
    for _ in range(3):
        torch.testing.assert_close(found(x), expected(x))
