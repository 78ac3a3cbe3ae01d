"""A model in stages computes what it computes without: outputs, weights, buffers and optimiser state, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch


def block(name, ipu):
    poptorch.Block.start(name, ipu_id=ipu)


class Mlp(nn.Module):
    shape = (6,)

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        block("A", 0)
        x = self.drop(self.a(x).relu())
        block("B", 1)
        x = self.drop(self.b(x).relu())
        block("C", 2)
        x = self.c(x).relu()
        block("D", 3)
        return self.d(x)


class Convolutions(nn.Module):
    shape = (2, 6, 6)

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))
        self.head = nn.Linear(36, 6)

    def forward(self, x):
        block("A", 0)
        x = self.norms[0](self.one(x)).relu()
        block("B", 1)
        x = self.norms[1](self.two(x)).relu()
        block("C", 2)
        x = F.max_pool2d(x, 2)
        block("D", 3)
        return self.head(x.flatten(1))


class Encoder(nn.Module):
    shape = (5, 8)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(4))
        self.head = nn.Linear(8, 6)

    def forward(self, x):
        for name, ipu, layer in zip("ABCD", range(4), self.layers, strict=True):
            block(name, ipu)
            x = layer(x)
        return self.head(x.mean(1))


class Skips(Mlp):
    """What the first stage computes is used by the third and the last as well."""

    def forward(self, x):
        block("A", 0)
        first = self.a(x).relu()
        block("B", 1)
        second = self.b(first).tanh()
        block("C", 2)
        third = self.c(second) * first
        block("D", 3)
        return self.d(third) + first + second


class TiedEmbedding(nn.Module):
    """The table of the first stage is the last layer, too, so both are on one IPU."""

    shape = (4,)

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, words):
        block("A", 0)
        x = self.table(words.abs().mul(10).long() % 6)
        block("B", 1)
        x = self.one(x).relu()
        block("C", 2)
        x = self.two(x).relu()
        block("D", 0)
        return F.linear(x.mean(1), self.table.weight)


MODELS = (Mlp, Convolutions, Encoder, Skips, TiedEmbedding)
AUTO = poptorch.AutoStage.AutoIncrement


def parallel_phases():
    strategy = poptorch.ParallelPhasedExecution("A", "B", "C", "D")
    for phase in range(4):
        strategy.phase(phase).ipus(phase % 2)
    return strategy


def serial_phases():
    strategy = poptorch.SerialPhasedExecution("A", "B", "C", "D")
    for phase in range(4):
        strategy.phase(phase).ipus(0)
    return strategy


STRATEGIES = {
    "pipelined": lambda: poptorch.PipelinedExecution(AUTO),
    "sharded": lambda: poptorch.ShardedExecution(AUTO),
    "serial phases": serial_phases,
    "parallel phases": parallel_phases,
}


class Training(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, target):
        y = self.model(x)
        return y, F.mse_loss(y, target)


def options_for(strategy, stages, replicas=1):
    options = poptorch.Options().randomSeed(1).outputMode(poptorch.OutputMode.All).replicationFactor(replicas)
    options.broadcastBuffers(False).runStages(stages).runSideBySide(False)  # which rounds otherwise
    return options.setExecutionStrategy(strategy) if strategy is not None else options


def unannotated(function):
    """Run without blocks: `Block.start` outside of a capture does nothing, and one stage holds all of them."""
    return function(poptorch.PipelinedExecution(poptorch.Stage("A", "B", "C", "D").ipu(0)), stages=False)


def trained(kind, strategy, *, stages, optimizer=torch.optim.SGD, recomputation=None, replicas=1):
    torch.manual_seed(0)
    model = Training(kind())
    options = options_for(strategy, stages, replicas).deviceIterations(2)
    options.Training.gradientAccumulation(7)
    if recomputation is not None:
        options._Popart.set("autoRecomputation", recomputation)
    chosen = optimizer(model.parameters(), lr=0.05)
    training = poptorch.trainingModel(model, options, chosen)
    rows = 2 * 7 * 2 * replicas
    torch.manual_seed(1)
    outputs = [training(torch.randn(rows, *kind.shape), torch.randn(rows, 6)) for _ in range(2)]
    state = [tensor for entry in chosen.state_dict()["state"].values() for tensor in entry.values()]
    return [*(tensor for pair in outputs for tensor in pair), *model.state_dict().values(), *state], training


def check_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_training_in_stages_is_training_of_the_whole(kind, strategy):
    expected, _ = unannotated(lambda *how, **more: trained(kind, *how, **more))
    found, training = trained(kind, STRATEGIES[strategy](), stages=True)
    assert training._executable.is_cut
    check_equal(found, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_inference_in_stages_is_inference_of_the_whole(kind, strategy):
    def run(strategy, *, stages):
        torch.manual_seed(0)
        model = kind().eval()
        options = options_for(strategy, stages).deviceIterations(4)
        torch.manual_seed(1)
        return poptorch.inferenceModel(model, options)(torch.randn(8, *kind.shape))

    assert torch.equal(run(STRATEGIES[strategy](), stages=True), unannotated(run))


@pytest.mark.parametrize("recomputation", [0, 3])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_recomputation_and_optimisers_change_nothing(optimizer, recomputation):
    expected, _ = unannotated(lambda *how, **more: trained(Mlp, *how, optimizer=optimizer, **more))
    pipeline = STRATEGIES["pipelined"]()
    found, training = trained(Mlp, pipeline, stages=True, optimizer=optimizer, recomputation=recomputation)
    programs = [program.name for program in training._executable.programs]
    assert ("recompute0" in programs) == (recomputation > 0)
    check_equal(found, expected)


def test_replicas_of_a_pipeline_share_one_update():
    expected, _ = unannotated(lambda *how, **more: trained(Convolutions, *how, replicas=2, **more))
    found, _ = trained(Convolutions, STRATEGIES["pipelined"](), stages=True, replicas=2)
    check_equal(found, expected)


def test_each_section_updates_its_own_weights():
    _, training = trained(Mlp, STRATEGIES["pipelined"](), stages=True)
    names = [program.name for program in training._executable.programs]
    assert [name for name in names if name.startswith("update")] == ["update0", "update1", "update2", "update3"]


@pytest.mark.inductor
@pytest.mark.parametrize("kind", [Mlp])
def test_stages_run_as_native_code(kind, engine):
    def run(strategy, *, stages):
        torch.manual_seed(0)
        model = Training(kind())
        options = options_for(strategy, stages).engine(engine)
        options.Training.gradientAccumulation(7)
        training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.05))
        torch.manual_seed(1)
        training(torch.randn(14, *kind.shape), torch.randn(14, 6))
        return list(model.state_dict().values())

    for a, b in zip(run(STRATEGIES["pipelined"](), stages=True), unannotated(run), strict=True):
        torch.testing.assert_close(a, b)
