"""Models that are interesting because of the layers they use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from oracle.zoo import Supervised, adam, add, case, classification, integers, normal, regression, tokens

add("Mlp", lambda: Supervised(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), regression(4), optimizer=adam)

add(
    "BatchNorm1d",
    lambda: Supervised(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)),
    regression(4),
    optimizer=adam,
)
add(
    "BatchNorm2d",
    lambda: Supervised(
        nn.Conv2d(2, 3, 3, bias=False),
        nn.BatchNorm2d(3, momentum=0.3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 2),
    ),
    regression(2, 6, 6),
    optimizer=adam,
)
add(
    "BatchNormWithCumulativeAverage",  # Python reads the counter of batches
    lambda: Supervised(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 2)),
    regression(4),
)
add(
    "Conv1d",
    lambda: Supervised(nn.Conv1d(2, 3, 3, padding=1), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 2)),
    regression(2, 8),
)
add(
    "Conv2dGroupNorm",
    lambda: Supervised(
        nn.Conv2d(2, 4, 3, groups=2, stride=2, bias=False),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 2),
    ),
    regression(2, 7, 7),
)
add(
    "Conv3d",
    lambda: Supervised(
        nn.Conv3d(1, 2, 2), nn.ReLU(inplace=True), nn.MaxPool3d((2, 1, 1)), nn.Flatten(), nn.Linear(8, 2)
    ),
    regression(1, 3, 3, 3),
)
add(
    "ConvTranspose2d",
    lambda: Supervised(
        nn.ConvTranspose2d(2, 2, 3, stride=2, output_padding=1), nn.GELU(), nn.AdaptiveMaxPool2d(2), nn.Flatten()
    ),
    regression(2, 3, 3, target=(8,)),
)
add(
    "InstanceNorm",
    lambda: Supervised(
        nn.Conv2d(1, 3, 3, bias=False),
        nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        nn.LeakyReLU(),
        nn.Flatten(),
        nn.Linear(27, 2),
    ),
    regression(1, 5, 5),
)
add(
    "LayerNorm",
    lambda: Supervised(nn.Linear(4, 6), nn.LayerNorm(6), nn.PReLU(), nn.RMSNorm(6), nn.Linear(6, 2)),
    regression(4),
    optimizer=adam,
)
add(
    "ResizeAndShuffle",
    lambda: Supervised(
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ReflectionPad2d(1),
        nn.Conv2d(1, 4, 3, stride=2),
        nn.PixelShuffle(2),
        nn.Flatten(),
        nn.Linear(64, 2),
    ),
    regression(1, 4, 4),
)


@case(regression(3))
class BatchNormCalledTwice(nn.Module):
    """A shared layer with running statistics: two updates for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x, y):
        out = self.head(self.norm(self.fc(self.norm(self.fc(x)))))
        return out, F.mse_loss(out, y)


@case(regression(3))
class BatchNormInEvalMode(nn.Module):
    """A layer that stays in eval mode inside a training model."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def train(self, mode: bool = True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x, y):
        out = self.head(self.norm(self.fc(x)))
        return out, F.mse_loss(out, y)


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 2)

    def forward(self, x, y):
        if not self.layer.batch_first:
            x = x.transpose(0, 1)
        sequence, state = self.layer(x)
        out = self.head(sequence[:, -1] if self.layer.batch_first else sequence[-1])
        return {"out": out, "state": state, "loss": F.mse_loss(out, y)}


add("Lstm", lambda: Recurrent(nn.LSTM(3, 4), 4), regression(3, 3), loss=lambda r: r["loss"], optimizer=adam)
add(
    "LstmTwoLayersBidirectional",
    lambda: Recurrent(nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), 8),
    regression(3, 3),
    loss=lambda r: r["loss"],
)
add(
    "Gru",
    lambda: Recurrent(nn.GRU(3, 4, bidirectional=True, batch_first=True), 8),
    regression(3, 3),
    loss=lambda r: r["loss"],
)
add("Rnn", lambda: Recurrent(nn.RNN(3, 4, num_layers=2), 4), regression(3, 3), loss=lambda r: r["loss"], optimizer=adam)
add(
    "LstmWithDropout",
    lambda: Recurrent(nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True), 4),
    regression(3, 3),
    loss=lambda r: r["loss"],
    is_random=True,
)


@case(regression(3))
class LstmCellLoop(nn.Module):
    """A recurrent cell stepped by Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(1, 4), nn.Linear(4, 2)

    def forward(self, x, y):
        hidden, memory = torch.zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            hidden, memory = self.cell(x[:, t : t + 1], (hidden, memory))
        out = self.head(hidden)
        return out, F.mse_loss(out, y)


@case(regression(3, 4, target=(3, 4)))
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out, weights = self.attention(x, x, x, attn_mask=mask)
        return out, F.mse_loss(out, y), weights


@case(regression(3, 4, target=(3, 4)))
class ScaledDotProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)

    def forward(self, x, y):
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return out, F.mse_loss(out, y)


class Encoder(nn.Module):
    def __init__(self, **how) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, **how)

    def forward(self, x, y):
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        out = self.layer(x, src_key_padding_mask=padding)
        return out, F.mse_loss(out, y)


add("TransformerEncoderLayer", lambda: Encoder(dropout=0.0), regression(3, 4, target=(3, 4)))
add(
    "TransformerEncoderLayerWithDropout",
    lambda: Encoder(dropout=0.3, norm_first=True, activation="gelu"),
    regression(3, 4, target=(3, 4)),
    is_random=True,
)


@case(lambda g: ((normal(g, 3, 4), normal(g, 2, 4)), {}))
class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True)

    def forward(self, source, target):
        mask = self.both.generate_square_subsequent_mask(target.shape[1])
        out = self.both(source, target, tgt_mask=mask, tgt_is_causal=True)
        return out, F.mse_loss(out, target)


@case(lambda g: ((integers(g, 7, 3), normal(g, 3), normal(g, 2)), {}), optimizer=adam)
class Bags(nn.Module):
    """Bags of words with weights, and with a padding word."""

    def __init__(self) -> None:
        super().__init__()
        self.total = nn.EmbeddingBag(7, 4, mode="sum")
        self.mean = nn.EmbeddingBag(7, 4, mode="mean", padding_idx=0)
        self.head = nn.Linear(8, 2)

    def forward(self, words, weights, y):
        out = self.head(torch.cat([self.total(words, per_sample_weights=weights), self.mean(words)], 1))
        return out, F.mse_loss(out, y)


add(
    "EmbeddingWithPadding",
    lambda: Supervised(nn.Embedding(7, 3, padding_idx=1), nn.Flatten(), nn.Linear(9, 2)),
    tokens(3, 7),
    optimizer=adam,
)
add(
    "EmbeddingWithMaxNorm",  # renormalises its weights in place in forward
    lambda: Supervised(nn.Embedding(7, 3, max_norm=0.7), nn.Flatten(), nn.Linear(9, 2)),
    tokens(3, 7),
)
add(
    "EmbeddingScaledByFrequency",
    lambda: Supervised(nn.Embedding(7, 3, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(9, 2)),
    tokens(3, 7),
)


@case(classification(5))
class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(2, 3, 3)

    def forward(self, x, label):
        out = self.both(*x.split((2, 3), 1))
        return out, F.cross_entropy(out, label)


@case(regression(1, 4, 4, target=(1, 4, 4)), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.005))
class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Linear(16, 6)
        nn.init.normal_(self.theta.weight, std=0.01)

    def forward(self, x, y):
        grid = F.affine_grid(self.theta(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
        out = F.grid_sample(x, grid, align_corners=False)
        return out, F.mse_loss(out, y)


@case(regression(1, 4, 4, target=(1, 4, 4)))
class PoolAndUnpool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x, y):
        small, where = F.max_pool2d(self.conv(x), 2, return_indices=True)
        out = F.max_unpool2d(small, where, 2)
        return out, F.mse_loss(out, y), where


@case(regression(1, 4, 4, target=(4, 4)))
class FoldAndUnfold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x, y):
        patches = F.unfold(x, 2, stride=2)
        out = F.fold(self.mix(patches.transpose(1, 2)).transpose(1, 2), (4, 4), 2, stride=2).squeeze(1)
        return out, F.mse_loss(out, y)


@case(regression(8))
class Spectrum(nn.Module):
    """Complex numbers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.head = nn.Parameter(torch.randn(5, dtype=torch.complex64).abs()), nn.Linear(8, 2)

    def forward(self, x, y):
        out = self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8))
        return out, F.mse_loss(out, y)


@case(regression(3))
class LinearAlgebra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.root, self.head = nn.Parameter(torch.randn(3, 3)), nn.Linear(3, 2)

    def forward(self, x, y):
        positive = self.root @ self.root.mT + torch.eye(3)
        factor = torch.linalg.cholesky(positive)
        out = self.head(
            torch.linalg.solve(positive, x.mT).mT + torch.linalg.solve_triangular(factor, x.mT, upper=False).mT
        )
        return out, F.mse_loss(out, y) + 0.0 * torch.logdet(positive)


add(
    "OldWeightNorm",
    lambda: Supervised(nn.utils.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.utils.weight_norm(nn.Linear(3, 2))),
    regression(4),
    optimizer=adam,
)
add(
    "WeightNorm",
    lambda: Supervised(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)),
    regression(4),
    optimizer=adam,
)
add(
    "SpectralNorm",
    lambda: Supervised(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)),
    regression(4),
)
add(
    "OldSpectralNorm",
    lambda: Supervised(nn.utils.spectral_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)),
    regression(4),
)
add(
    "Orthogonal",
    lambda: Supervised(nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2)),
    regression(3),
)


def _pruned() -> nn.Module:
    from torch.nn.utils import prune

    layer = nn.Linear(4, 3)
    prune.random_unstructured(layer, "weight", amount=0.5)
    return Supervised(layer, nn.Tanh(), nn.Linear(3, 2))


add("Pruned", _pruned, regression(4))
add(
    "ScriptedSubmodule",
    lambda: Supervised(torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), nn.Linear(3, 2)),
    regression(4),
)
add(
    "TracedSubmodule",
    lambda: Supervised(torch.jit.trace(nn.Linear(4, 3), torch.zeros(1, 4)), nn.Linear(3, 2)),
    regression(4),
)
