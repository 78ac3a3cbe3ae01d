"""A model in parallel phases whose blocks and stages are named by formatted texts, as older documents show it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch

REPEATS, SIZE = 3, 10


class Phases(nn.Module):
    """Each repetition has an even phase of one product on each IPU, and an odd one of two."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(SIZE, SIZE) / SIZE) for _ in range(REPEATS * 6))

    def forward(self, in0, target=None):
        weights, in1 = iter(self.weights), in0[:, SIZE:]
        values = [in0[:, :SIZE], in1]
        for phase in [p for n in range(REPEATS) for p in (2 * n, 2 * n + 1, 2 * n + 1)]:
            for ipu in range(2):
                with poptorch.Block(f"phase{phase}_ipu{ipu}"):
                    values[ipu] = values[ipu] @ next(weights)
        with poptorch.Block(f"phase{REPEATS * 2 - 1}_ipu1"):
            out = values[0] + values[1]
            return out if target is None else (out, nn.functional.mse_loss(out, target))


def strategy():
    phases = []
    for n in range(REPEATS):
        phases.append([poptorch.Stage(f"phase{2 * n}_ipu0").ipu(0), poptorch.Stage(f"phase{2 * n}_ipu1").ipu(2)])
        phases.append(
            [poptorch.Stage(f"phase{2 * n + 1}_ipu0").ipu(1), poptorch.Stage(f"phase{2 * n + 1}_ipu1").ipu(3)]
        )
    return poptorch.ParallelPhasedExecution(*phases)


@pytest.mark.parametrize("stages", [False, True])
def test_the_sample_computes_what_the_host_computes(stages):
    class Start(Phases):
        def forward(self, in0, target=None):
            poptorch.Block.start("phase0_ipu0")
            return super().forward(in0, target)

    torch.manual_seed(0)
    model = Start()
    x = torch.rand(20, 2 * SIZE)
    options = poptorch.Options().setExecutionStrategy(strategy()).runStages(stages)
    torch.testing.assert_close(poptorch.inferenceModel(model, options)(x), model(x))
