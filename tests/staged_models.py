"""Small models in four stages, and the ways to run them."""

from __future__ import annotations

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
