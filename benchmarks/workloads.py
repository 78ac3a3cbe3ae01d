"""The models that are measured: for each one a seeded model, seeded batches, an optimiser, and the speed we want.

`Workload.training_model()` gives a module whose `forward(x, y)` returns `(logits, loss)`; `Workload.network()` gives
the network inside it, whose `forward(x)` returns the logits. Everybody gets the same weights and batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
VOCABULARY, TOKENS = 4000, 128


# ---- networks


class EmbeddingMLP(nn.Module):
    """Eight tokens looked up in a large table, concatenated, and classified."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20000, 64)
        self.mlp = nn.Sequential(nn.Linear(8 * 64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.table(x).flatten(1))


class Residual(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 as it is used for 32 × 32 images: a 3 × 3 stem and no pooling in front."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels_in = 64
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(channels_in, channels, stride), Residual(channels, channels, 1)]
        channels_in = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class LSTMClassifier(nn.Module):
    """One LSTM layer and a classifier on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class TokenEmbedding(nn.Module):
    """Token plus position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(TOKENS, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.token(x) + self.position


def bert_mini() -> nn.Module:
    """Four layers of PyTorch's own encoder, 256 wide, and a head over the vocabulary; no dropout."""

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, activation="gelu", batch_first=True)

    return nn.Sequential(TokenEmbedding(256), *(layer() for _ in range(4)), nn.Linear(256, VOCABULARY))


class CausalBlock(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def gpt_mini() -> nn.Module:
    """Four causal blocks, 256 wide, and a head over the vocabulary."""
    blocks = (CausalBlock(256, 4) for _ in range(4))
    return nn.Sequential(TokenEmbedding(256), *blocks, nn.LayerNorm(256), nn.Linear(256, VOCABULARY))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def conv_net() -> nn.Module:
    """The usual first convolutional network: two small convolutions, each followed by pooling."""
    first = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*first, *second, nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10))


def wide_conv_net() -> nn.Module:
    """Wide convolutions at full resolution, where nearly all time is oneDNN's for every peer."""
    convolutions = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*convolutions, nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10))


def tiny() -> nn.Module:
    return nn.Linear(4, 4)


class WithLoss(nn.Module):
    """What a PopTorch training model looks like: `forward(x, y)` gives the logits and their cross entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.network(x)
        return logits, F.cross_entropy(logits.flatten(0, -2), y.flatten())


# ---- batches: (batch size, generator) → x, y


def features(*shape: int, classes: int = 10) -> Callable[[int, torch.Generator], Batch]:
    def make(size: int, generator: torch.Generator) -> Batch:
        x = torch.randn(size, *shape, generator=generator)
        return x, torch.randint(classes, (size,), generator=generator)

    return make


def bags(size: int, generator: torch.Generator) -> Batch:
    x = torch.randint(20000, (size, 8), generator=generator)
    return x, torch.randint(10, (size,), generator=generator)


def masked_tokens(size: int, generator: torch.Generator) -> Batch:
    """Predict the 15 % of tokens that were replaced by token 0; -100 is what cross entropy ignores."""
    original = torch.randint(1, VOCABULARY, (size, TOKENS), generator=generator)
    hidden = torch.rand(size, TOKENS, generator=generator) < 0.15
    return original.masked_fill(hidden, 0), original.masked_fill(~hidden, -100)


def next_tokens(size: int, generator: torch.Generator) -> Batch:
    text = torch.randint(VOCABULARY, (size, TOKENS + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


# ---- optimisers


def sgd(parameters: list[nn.Parameter], **options: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **options)


def slow_sgd(parameters: list[nn.Parameter], **options: bool) -> torch.optim.Optimizer:
    """For resnet18, which is chaotic at lr 0.01: in float64, weights changed by 1e-7 change the tenth loss by 1 %."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, **options)


def adamw(parameters: list[nn.Parameter], **options: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, **options)


# ---- the list


@dataclass(frozen=True)
class Workload:
    """One thing to train and to run, and how many times faster than the better of eager and compile it should be."""

    name: str
    network_factory: Callable[[], nn.Module]
    batch_factory: Callable[[int, torch.Generator], Batch]
    optimizer_factory: Callable[..., torch.optim.Optimizer]
    batch_size: int
    goal: float
    is_small: bool = False
    infers: bool = True
    convolves: bool = False
    dtype: torch.dtype = torch.float32
    fed: torch.dtype | None = None  # the type of the batches, if it is not that of the weights

    def network(self) -> nn.Module:
        """The network with its initial weights, always the same."""
        torch.manual_seed(1234)
        return self.network_factory().to(self.dtype)

    def training_model(self) -> WithLoss:
        return WithLoss(self.network())

    def optimizer(self, model: nn.Module, **options: bool) -> torch.optim.Optimizer:
        return self.optimizer_factory(list(model.parameters()), **options)

    def batches(self, count: int, size: int | None = None) -> list[Batch]:
        """The first batches of an endless sequence that never changes."""
        generator = torch.Generator().manual_seed(4321)
        batches = (self.batch_factory(size or self.batch_size, generator) for _ in range(count))
        dtype = self.fed or self.dtype
        return [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in batches]


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("mlp", mlp, features(784), sgd, 16, goal=2.5, is_small=True),
        Workload("mlp-b64", mlp, features(784), sgd, 64, goal=1.5, is_small=True, infers=False),
        Workload("embedding-sgd", EmbeddingMLP, bags, sgd, 32, goal=2.0, is_small=True),
        Workload("embedding-adamw", EmbeddingMLP, bags, adamw, 32, goal=1.0, is_small=True, infers=False),
        Workload("cnn", conv_net, features(1, 28, 28), sgd, 32, goal=1.8, is_small=True, convolves=True),
        Workload("cnn-wide", wide_conv_net, features(1, 28, 28), sgd, 32, goal=1.0, is_small=True, convolves=True),
        Workload("lstm", LSTMClassifier, features(32, 64), sgd, 16, goal=1.0, is_small=True),
        Workload("resnet18", resnet18, features(3, 32, 32), slow_sgd, 16, goal=1.0, convolves=True),
        Workload("bert-mini", bert_mini, masked_tokens, adamw, 8, goal=1.0),
        Workload("gpt-mini", gpt_mini, next_tokens, adamw, 8, goal=1.0),
        Workload("mlp-half", mlp, features(784), sgd, 16, goal=2.5, is_small=True, dtype=torch.float16),
        Workload(
            "cnn-half", conv_net, features(1, 28, 28), sgd, 32, 1.8, is_small=True, convolves=True, dtype=torch.float16
        ),
    )
}

TINY = Workload("tiny", tiny, features(4, classes=4), sgd, 4, goal=1.0, infers=False)
