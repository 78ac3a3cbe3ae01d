"""Micro-batches side by side: a call returns, collects and refuses what it does if they run one after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Regression


class Normed(nn.Module):
    """Rows, a number, a vector of one element and a constant per micro-batch, with statistics and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x, target):
        y = self.net(x)
        loss = F.mse_loss(y, target)
        return y, loss, y.sum().view(1), self.net[0].weight.detach() * 2


def options(side_by_side: bool | None, **counts: int) -> poptorch.Options:
    found = poptorch.Options().engine("eager").randomSeed(3)
    found.deviceIterations(counts.get("D", 1)).replicationFactor(counts.get("R", 1))
    found.Training.gradientAccumulation(counts.get("G", 1))
    return found if side_by_side is None else found.runSideBySide(side_by_side)


def train(module: nn.Module, chosen: poptorch.Options, lr: float = 0.1) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(module, chosen, torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9))


def width(executor: poptorch.PoplarExecutor) -> int:
    return executor._executable.schedule.width


ANCHORS = {"loss": "MseLoss:0", "dropped": "net/2/Mul:0", "gradient": "Gradient___net.3.bias"}


@pytest.mark.parametrize("mode", ["All", "Sum", "EveryN", "Final"])
@pytest.mark.parametrize("counts", [{"G": 3}, {"R": 2}, {"D": 4, "G": 2, "R": 2}], ids=str)
def test_every_output_mode_returns_the_same_both_ways(mode, counts):
    found = []
    for side_by_side in (True, False):
        torch.manual_seed(0)
        module = Normed()
        period = counts.get("D", 1) if mode == "EveryN" else None
        chosen = options(side_by_side, **counts).outputMode(poptorch.OutputMode[mode], period)
        for name, anchored in ANCHORS.items():
            chosen.anchorTensor(name, anchored, poptorch.OutputMode.All)
        executor = train(module, chosen)
        rows = 4 * counts.get("D", 1) * counts.get("G", 1) * counts.get("R", 1)
        generator = torch.Generator().manual_seed(1)
        results = [
            executor(torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator))
            for _ in range(2)
        ]
        assert (width(executor) > 1) == side_by_side
        found.append([*results, list(module.state_dict().values()), *map(executor.getAnchoredTensor, ANCHORS)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_replicas_that_share_rows_share_them_side_by_side():
    found = []
    for side_by_side in (True, False):
        torch.manual_seed(0)
        chosen = options(side_by_side, R=4, D=2).inputReplicaGrouping(2, poptorch.CommGroupType.Orthogonal)
        executor = train(Normed(), chosen.outputMode(poptorch.OutputMode.All))
        found.append(executor(torch.arange(24.0).view(8, 3).sin(), torch.zeros(8, 2)))
        assert (width(executor) > 1) == side_by_side
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


class Guarded(Regression):
    def forward(self, x, target):
        y = self.fc(x)
        if x.sum() > 0:
            y = y * 2
        return y, F.mse_loss(y, target)


def test_a_guard_names_the_micro_batch_that_breaks_it_and_nothing_is_updated():
    module = Guarded()
    executor = train(module, options(True, G=3))
    executor(torch.ones(6, 3), torch.ones(6, 2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.ones(6, 3)
    x[2:4] = -1
    with pytest.raises(poptorch.Error, match=r"micro-batch 1 of this call(?s:.*)x\.sum\(\) > 0"):
        executor(x, torch.ones(6, 2))
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert width(executor) == 3


def test_small_micro_batches_are_put_together_and_large_ones_are_not():
    small, large = train(Regression(), options(None, G=2)), train(Regression(64, 64), options(None, G=2))
    small.compile(torch.ones(8, 3), torch.ones(8, 2))
    large.compile(torch.ones(2**17, 64), torch.ones(2**17, 64))
    assert (width(small), width(large)) == (2, 1)


def test_statistics_of_images_keep_micro_batches_apart_unless_they_are_put_together():
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            return poptorch.identity_loss(self.norm(x).square().mean(), reduction="none")

    by_rule, together = train(Images(), options(None, G=2)), train(Images(), options(True, G=2))
    for executor in (by_rule, together):
        executor.compile(torch.ones(4, 3, 2, 2))
    assert (width(by_rule), width(together)) == (1, 2)


class Drawing(Regression):
    def forward(self, x, target):
        return super().forward(x * torch.bernoulli(x.sigmoid()), target)


def test_a_warning_says_why_micro_batches_cannot_be_put_together(caplog):
    executor = train(Drawing(), options(True, G=2))
    executor.compile(torch.ones(8, 3), torch.ones(8, 2))
    assert width(executor) == 1
    assert "random numbers that depend on data" in caplog.text


def test_a_wide_run_is_shown_on_the_ipus_of_all_replicas():
    executor = train(Regression(), options(True, G=2, R=2))
    executor(torch.ones(8, 3), torch.ones(8, 2))
    text = str(executor._executable.schedule)
    assert text.count("wide_step 0 to 3") == 2
