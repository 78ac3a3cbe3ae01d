"""Recomputation drops activations and changes no result."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from measuring import peak_nbytes
from poptorch.ir import Direction, note_of


class Chain(nn.Module):
    """Blocks in a row; the value after each is stored if `stores`."""

    def __init__(self, stores, depth=6, drop=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(drop))
            for _ in range(depth)
        )
        self.stores = stores

    def forward(self, x, target):
        for block in self.blocks:
            x = block(x)
            x = poptorch.recomputationCheckpoint(x) if self.stores else x
        return x, F.mse_loss(x, target)


def train(*, stores=False, option=None, engine="eager", drop=0.0, accumulation=1):
    torch.manual_seed(0)
    model = Chain(stores, drop=drop)
    options = poptorch.Options().engine(engine).randomSeed(1).runSideBySide(False)
    options.Training.gradientAccumulation(accumulation)
    if option is not None:
        options._Popart.set("autoRecomputation", option)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(1)
    rows = 8 * accumulation
    outputs = [training(torch.randn(rows, 16), torch.randn(rows, 16)) for _ in range(3)]
    return [*(tensor for pair in outputs for tensor in pair), *model.parameters()], training


def products(training):
    """How many matrix products with a bias, which are all of forward, each part of the step has."""
    notes = [note_of(n) for n in training._executable.step.graph.ops.nodes if "addmm" in str(n.target)]
    return [sum(note.direction is direction for note in notes) for direction in (Direction.FORWARD, Direction.BACKWARD)]


@pytest.mark.inductor
@pytest.mark.parametrize(
    "how",
    [{"stores": True}, pytest.param({"option": 1}, marks=pytest.mark.only_long), {"option": 4, "stores": True}],
    ids=str,
)
def test_results_are_those_without_recomputation(how, engine):
    found, _ = train(**how, engine=engine, drop=0.25, accumulation=2)
    expected, _ = train(engine=engine, drop=0.25, accumulation=2)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_stored_values_ask_for_recomputation():
    assert products(train(stores=True)[1])[1] > 0
    assert products(train()[1])[1] == 0


def test_the_option_wins():
    assert products(train(stores=True, option=0)[1])[1] == 0
    assert products(train(option=1)[1])[1] > 0


def test_inference_keeps_nothing_anyway():
    options = poptorch.Options().engine("eager")
    inference = poptorch.inferenceModel(Chain(stores=True).eval(), options)
    x, target = torch.randn(8, 16), torch.randn(8, 16)
    assert torch.equal(inference(x, target)[0], Chain.forward(inference.model, x, target)[0])


def peak_of(training, rows):
    """The most that tensors take during a call that compiles nothing."""
    x, target = torch.randn(rows, 16), torch.randn(rows, 16)
    training(x, target)
    return peak_nbytes(lambda: training(x, target))


def test_less_memory_is_used_at_once():
    peaks = {}
    for stores in (False, True):
        model = Chain(stores, depth=16)
        training = poptorch.trainingModel(
            model, poptorch.Options().engine("eager"), torch.optim.SGD(model.parameters(), lr=0.1)
        )
        peaks[stores] = peak_of(training, rows=512)
    assert peaks[False] > 2 * peaks[True]


class TwoStages(nn.Module):
    """Three layers in the first stage, of which some are followed by a stored value, and one in the second."""

    def __init__(self, stored):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.stored = stored

    def forward(self, x):
        poptorch.Block.start(ipu_id=0)
        for number, layer in enumerate(self.layers[:3]):
            x = torch.sigmoid(layer(x))
            x = poptorch.recomputationCheckpoint(x) if number < self.stored else x
        poptorch.Block.start(ipu_id=1)
        return poptorch.identity_loss(self.layers[3](x), "mean")


def kept_by_a_stage(stored):
    """How many values the first of two stages gives to other programs."""
    model = TwoStages(stored)
    options = poptorch.Options().engine("eager").runStages(True).runSideBySide(False)
    options.Training.gradientAccumulation(3)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    training(torch.ones(3, 4))
    forward = next(program for program in training._executable.programs if program.name == "forward0")
    return len(forward.signature.outputs)


def test_a_stage_of_a_pipeline_keeps_the_input_of_the_next_and_what_is_stored():
    assert [kept_by_a_stage(stored) for stored in (0, 1, 2)] == [1, 2, 3]
