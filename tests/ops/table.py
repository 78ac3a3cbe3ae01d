"""One call of every operation that programs for IPUs rely on, by section of the list of supported operations.

A row is a function and its arguments. Tensors of floats are differentiated where PyTorch does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn

Row = tuple[Any, ...]  # a function or module, and the tensors to call it with

_draw = torch.Generator().manual_seed(5)


def floats(*shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    return torch.empty(shape).uniform_(low, high, generator=_draw).requires_grad_()


def integers(high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_draw).to(dtype)


def changing(name: str, *args: Any, **kwargs: Any) -> Callable[..., torch.Tensor]:
    """A method that changes its tensor in place, called on an intermediate value."""
    return lambda x, *more: getattr(x * 1, name)(*more, *args, **kwargs)


X, Y = floats(3, 4), floats(3, 4)
ROW, COLUMN = floats(4), floats(3, 1)
POSITIVE, UNIT = floats(3, 4, low=0.2, high=3.0), floats(3, 4, low=-0.9, high=0.9)
ABOVE_ONE = floats(3, 4, low=1.1, high=3.0)
WHOLE, OTHER = integers(9, 3, 4, low=-9), integers(9, 3, 4, low=1, dtype=torch.int32)
MASK = X.detach() > 0
PLACES = integers(3, 3, 4)
ROWS = torch.tensor([2, 0])
SIGNAL, IMAGE, VOLUME = floats(2, 4, 8), floats(2, 4, 6, 6), floats(2, 4, 4, 4, 4)
SCORES, LABELS = floats(5, 4), integers(4, 5)
SEQUENCE = floats(3, 2, 4)

CREATION: dict[str, Row] = {
    "arange": (lambda x: x + torch.arange(4), X),
    "full": (lambda x: x + torch.full((3, 4), 2.5), X),
    "full_like": (lambda x: x + torch.full_like(x, 2.5), X),
    "fill_": (changing("fill_", 2.5), X),
    "ones": (lambda x: x + torch.ones(3, 4), X),
    "ones_like": (lambda x: x + torch.ones_like(x), X),
    "zeros": (lambda x: x + torch.zeros(3, 4), X),
    "zeros_like": (lambda x: x + torch.zeros_like(x), X),
    "zero_": (changing("zero_"), X),
    "new_ones": (lambda x: x + x.new_ones(3, 4), X),
    "new_zeros": (lambda x: x + x.new_zeros(3, 4), X),
    "new_full": (lambda x: x + x.new_full((3, 4), 1.5), X),
    "empty": (lambda x: torch.empty(3, 4).copy_(x), X),
    "tensor": (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), X),
    "linspace": (lambda x: x + torch.linspace(0, 1, 4), X),
    "eye": (lambda x: x @ torch.eye(4), X),
    "triu of a constant": (lambda x: x @ torch.triu(torch.ones(4, 4)), X),
    "tril of a constant": (lambda x: x @ torch.tril(torch.ones(4, 4)), X),
    "triu": (torch.triu, X),
    "tril": (torch.tril, X),
}

SHAPING: dict[str, Row] = {
    "bincount": (lambda x: torch.bincount(x.flatten(), minlength=9), integers(9, 12)),
    "bucketize": (lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])), X),
    "bucketize, right": (lambda x: torch.bucketize(x, torch.tensor([-1, 0, 1]), right=True), X),
    "bucketize, integers between floats": (lambda x: torch.bucketize(x, torch.tensor([-1.5, 0.0, 1.0])), WHOLE),
    "bucketize, integers, right": (lambda x: torch.bucketize(x, torch.tensor([-1, 0, 1]), right=True), WHOLE),
    "bucketize, out": (
        lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]), out=torch.empty(3, 4, dtype=torch.int64)),
        X,
    ),
    "cat": (lambda x, y: torch.cat([x, y, x], 1), X, Y),
    "chunk": (lambda x: x.chunk(3, 1), X),
    "gather": (lambda x, i: x.gather(0, i), X, PLACES),
    "index": (lambda x, i: x[i], X, ROWS),
    "index, two dimensions": (lambda x, i: x[i, i + 1], X, ROWS),
    "index_put_": (lambda x, i: (x * 1).index_put_((i,), x[:2] * 2), X, ROWS),
    "index_put_, accumulate": (lambda x, i: (x * 1).index_put_((i,), x[:2], accumulate=True), X, ROWS),
    "index_put_, mask": (lambda x, m: (x * 1).index_put_((m,), torch.tensor(3.0)), X, MASK),
    "assignment to a mask": (lambda x, m: torch.where(m, 0.0, x), X, MASK),
    "index_fill_": (lambda x, i: (x * 1).index_fill_(0, i, 3.0), X, ROWS),
    "index_select": (lambda x, i: x.index_select(0, i), X, ROWS),
    "index_add_": (lambda x, i, y: (x * 1).index_add_(0, i, y[:2]), X, ROWS, Y),
    **{
        f"index_reduce_, {how}": (lambda x, i, y, how=how: (x * 1).index_reduce_(0, i, y[:2], how), X, ROWS, Y)
        for how in ("mean", "amax", "amin", "prod")
    },
    **{
        f"index_reduce_, {how}, columns": (
            lambda x, i, y, how=how: (x * 1).index_reduce_(1, i, y[:, :2], how),
            X,
            ROWS,
            Y,
        )
        for how in ("mean", "amax", "amin", "prod")
    },
    "masked_fill": (lambda x, m: x.masked_fill(m, 3.0), X, MASK),
    "masked_fill_": (lambda x, m: (x * 1).masked_fill_(m, 3.0), X, MASK),
    "narrow": (lambda x: x.narrow(-1, 0, 2), X),
    "permute": (lambda x: x.permute(2, 0, 1), SIGNAL),
    "repeat": (lambda x: x.repeat(2, 1, 3), X),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), X),
    "reshape": (lambda x: x.reshape(2, -1), X),
    "view": (lambda x: x.view(12), X),
    "flatten": (lambda x: x.flatten(1), SIGNAL),
    "roll": (lambda x: x.roll((1, 2), (0, 1)), X),
    "scatter": (lambda x, i, y: x.scatter(0, i, y), X, PLACES, Y),
    "scatter, value": (lambda x, i: x.scatter(0, i, 2.5), X, PLACES),
    "scatter, add": (lambda x, i, y: x.detach().scatter(0, i, y.detach(), reduce="add"), X, PLACES, Y),
    "scatter, multiply": (lambda x, i: x.detach().scatter(0, i, 2.0, reduce="multiply"), X, PLACES),
    "scatter_add": (lambda x, i, y: x.scatter_add(0, i, y), X, PLACES, Y),
    "scatter_add, columns": (lambda x, i, y: x.scatter_add(-1, i, y), X, PLACES, Y),
    **{
        f"scatter_reduce, {how}, columns": (
            lambda x, i, y, how=how: x.scatter_reduce(1, i, y, how),
            X,
            PLACES,
            Y,
        )
        for how in ("sum", "amin", "amax", "mean", "prod")
    },
    **{
        f"scatter_reduce, {how}{'' if own else ', without self'}": (
            lambda x, i, y, how=how, own=own: x.scatter_reduce(0, i, y, how, include_self=own),
            X,
            PLACES,
            Y,
        )
        for how in ("sum", "amin", "amax", "mean", "prod")
        for own in (True, False)
    },
    "select": (lambda x: x.select(-1, 1), X),
    "slice": (lambda x: x[1:, ::2], X),
    "slice of a division": (lambda x: (x / 2)[:], integers(9, 1)),
    "split": (lambda x: x.split(3, 1), X),
    "split_with_sizes": (lambda x: x.split([1, 3], 1), X),
    "squeeze": (lambda x: x.unsqueeze(1).squeeze(), X),
    "stack": (lambda x, y: torch.stack([x, y], 1), X, Y),
    "t": (lambda x: x.t(), X),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 0), X, PLACES),
    "transpose": (lambda x: x.transpose(0, 2), SIGNAL),
    "T": (lambda x: x.T, X),
    **{f"unbind, {d}": (lambda x, d=d: x.unbind(d), SEQUENCE) for d in range(3)},
    **{f"unbind, {d}, half": (lambda x, d=d: x.half().unbind(d), SEQUENCE) for d in range(3)},
    "unfold": (lambda x: x.unfold(1, 2, 1), X),
    "unsqueeze": (lambda x: x.unsqueeze(-1), X),
    "where": (lambda m, x, y: torch.where(m, x, y), MASK, X, Y),
    "expand": (lambda x: x.expand(2, 3, 4), COLUMN),
    "expand_as": (lambda x, y: x.expand_as(y), COLUMN, X),
    "broadcast_to": (lambda x: x.broadcast_to(3, 4), ROW),
    "flip": (lambda x: x.flip(0, 1), X),
    "clone": (torch.clone, X),
    "copy_": (lambda x, y: (x * 1).copy_(y), X, ROW),
    "detach": (lambda x: x + x.detach(), X),
    "contiguous": (lambda x: x.t().contiguous(), X),
    "type_as": (lambda x, y: x.type_as(y) * y, WHOLE, X),
}

RANDOM: dict[str, Row] = {
    "bernoulli": (lambda x: torch.bernoulli(x.sigmoid()), X),
    "bernoulli_": (changing("bernoulli_", 0.4), X),
    "exponential_": (changing("exponential_", 2.0), X),
    "normal": (lambda x: torch.normal(x, 2.0), X),
    "normal_": (changing("normal_", 1.0, 2.0), X),
    "rand": (lambda x: x * torch.rand(3, 4), X),
    "rand_like": (lambda x: x * torch.rand_like(x), X),
    "randn": (lambda x: x * torch.randn(3, 4), X),
    "randint": (lambda x: x * torch.randint(2, 9, (3, 4)), X),
    "random_": (changing("random_", 2, 9), X),
    "randperm": (lambda x: x[:, torch.randperm(4)], X),
    "uniform_": (changing("uniform_", -1.0, 2.0), X),
    "Bernoulli": (lambda x: D.Bernoulli(x.sigmoid()).sample(), X),
    "Normal": (lambda x, y: D.Normal(x, y).rsample(), X, POSITIVE),
    "Uniform": (lambda x: D.Uniform(x, x + 1).rsample(), X),
    "Exponential": (lambda x: D.Exponential(x).rsample(), POSITIVE),
    "dropout": (lambda x: F.dropout(x, 0.4), X),
    "feature dropout": (lambda x: F.dropout2d(x, 0.4), IMAGE),
    "rrelu": (lambda x: F.rrelu(x, training=True), X),
}

_UNARY = {
    X: """abs asinh atan ceil cos cosh erf erfc exp expm1 floor frac neg relu round sigmoid sign sin sinh square tan
    tanh trunc""",
    POSITIVE: "log log10 log1p log2 reciprocal rsqrt sqrt",
    UNIT: "acos asin atanh",
    ABOVE_ONE: "acosh",
}
_BINARY = "add atan2 div fmod maximum minimum mul pow remainder rsub sub true_divide"
_LOGICAL = "logical_and logical_or logical_xor"

POINTWISE: dict[str, Row] = {
    **{name: (getattr(torch, name), x) for x, names in _UNARY.items() for name in names.split()},
    **{name: (getattr(torch, name), POSITIVE, ABOVE_ONE) for name in _BINARY.split()},
    **{name: (getattr(torch, name), MASK, ~MASK) for name in _LOGICAL.split()},
    **{f"{name}_": (changing(f"{name}_"), X, POSITIVE) for name in ("add", "sub", "mul", "div")},
    "add, alpha": (lambda x, y: torch.add(x, y, alpha=0.3), X, Y),
    "addcdiv": (lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), X, Y, POSITIVE),
    "addcmul": (lambda x, y, z: torch.addcmul(x, y, z, value=0.5), X, Y, ROW),
    "bitwise_and": (torch.bitwise_and, WHOLE, OTHER),
    "bitwise_or": (torch.bitwise_or, WHOLE, OTHER),
    "bitwise_xor": (torch.bitwise_xor, MASK, ~MASK),
    "bitwise_not": (torch.bitwise_not, WHOLE),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), X),
    "clamp, tensors": (lambda x, low, high: x.clamp(low, high), X, UNIT, ABOVE_ONE),
    "clamp_max": (lambda x: x.clamp_max(0.5), X),
    "clamp_min": (lambda x: x.clamp_min(0.5), X),
    "floor_divide, integers": (torch.floor_divide, WHOLE, OTHER),
    "remainder, integers": (torch.remainder, WHOLE, OTHER),
    "logical_not": (torch.logical_not, X),
    "pow, number": (lambda x: x**3 + 2**x, X),
    "signum": (torch.sgn, X),
}

_OF_ALL = "mean norm prod std sum var std_mean var_mean "
_OF_DIMENSIONS = _OF_ALL + "amax amin logsumexp nansum"
_WITH_PLACES = "argmax argmin max median min"

REDUCTIONS: dict[str, Row] = {
    **{f"{name}, all": (getattr(torch, name), X) for name in (_OF_ALL + _WITH_PLACES).split()},
    **{f"{name}, a dimension": (partial(getattr(torch, name), dim=1), X) for name in _OF_DIMENSIONS.split()},
    **{
        f"{name}, a dimension": (partial(getattr(torch, name), dim=1, keepdim=True), X) for name in _WITH_PLACES.split()
    },
    "all": (lambda m: (m.all(), m.all(1)), MASK),
    "any": (lambda m: (m.any(), m.any(1)), MASK),
    "count_nonzero": (torch.count_nonzero, WHOLE),
    "sum of a comparison": (lambda x: (x > 0).sum(), X),
    "prod of a comparison": (lambda x: (x > 0).prod(), X),
}

COMPARISONS: dict[str, Row] = {
    **{name: (getattr(torch, name), X, Y) for name in ("eq", "ge", "gt", "le", "lt", "ne")},
    "isnan": (lambda x: torch.isnan(x.log()), X),
    "topk": (lambda x: x.topk(2, 1), X),
    "topk, smallest": (lambda x: x.topk(2, 1, largest=False), X),
    "argsort": (lambda x: x.argsort(1), X),
    "sort": (lambda x: x.sort(1, descending=True), X),
    "sort, stable": (lambda x: x.sort(dim=1, stable=True), OTHER),
}

OTHERS: dict[str, Row] = {
    "linalg.norm": (torch.linalg.norm, X),
    "linalg.vector_norm": (lambda x: torch.linalg.vector_norm(x, 3, dim=1), X),
    "linalg.matrix_norm": (torch.linalg.matrix_norm, X),
    "linalg.matrix_norm, 2": (lambda x: torch.linalg.matrix_norm(x, 2), X),
    "linalg.matrix_norm, nuclear": (lambda x: torch.linalg.matrix_norm(x, "nuc"), X),
    "linalg.cross": (lambda x, y: torch.linalg.cross(x, y, dim=0), X, Y),
    "cumsum": (lambda x: x.cumsum(1), X),
    "cumprod": (lambda x: x.cumprod(1), X),
    "cross": (lambda x, y: torch.cross(x, y, dim=0), X, Y),
    "meshgrid": (lambda x, y: torch.meshgrid(x, y.flatten(), indexing="ij"), ROW, COLUMN),
    "cartesian_prod": (lambda x, y: torch.cartesian_prod(x, y.flatten()), ROW, COLUMN),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=([1], [1])), X, Y),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), X, Y),
    "einsum, implicit": (lambda x, y: torch.einsum("ij,kj", x, y), X, Y),
    "einsum, chain": (lambda x, y, z: torch.einsum("ij,kj,j->i", x, y, z), X, Y, ROW),
    "einsum, transpose": (lambda x: torch.einsum("ji", x), X),
    "einsum, diagonal": (lambda x: torch.einsum("ii->i", x), floats(3, 3)),
    "cdist": (torch.cdist, X, Y),
    "pairwise_distance": (F.pairwise_distance, X, Y),
    "cosine_similarity": (F.cosine_similarity, X, Y),
    "one_hot": (lambda i: F.one_hot(i, 4), LABELS),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), IMAGE),
    "im2col": (lambda x: F.unfold(x, 2), IMAGE),
    "col2im": (lambda x: F.fold(F.unfold(x, 2), (6, 6), 2), IMAGE),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y.t(), beta=0.5, alpha=2), floats(3), X, Y),
    "addmm, no bias": (lambda b, x, y: torch.addmm(b / 0, x, y.t(), beta=0), floats(3), X, Y),
    "addmv": (torch.addmv, floats(3), X, ROW),
    "baddbmm": (lambda b, x: torch.baddbmm(b, x, x.transpose(1, 2), beta=0.5), floats(2, 4, 4), SIGNAL),
    "bmm": (lambda x: torch.bmm(x, x.transpose(1, 2)), SIGNAL),
    "dot": (lambda x: torch.dot(x, x + 1), ROW),
    "linear": (lambda x, w, b: F.linear(x, w, b), X, Y, floats(3)),
    "matmul": (torch.matmul, SIGNAL, floats(8, 3)),
    "matmul, vectors": (lambda x: x @ (x + 1), ROW),
    "mm": (lambda x, y: torch.mm(x, y.t()), X, Y),
    "mv": (torch.mv, X, ROW),
}

LAYERS: dict[str, Row] = {
    "Conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), SIGNAL),
    "Conv2d": (nn.Conv2d(4, 3, 3, padding="same", dilation=2), IMAGE),
    "Conv3d": (nn.Conv3d(4, 3, 2, bias=False), VOLUME),
    "ConvTranspose1d": (nn.ConvTranspose1d(4, 3, 3, stride=2, output_padding=1), SIGNAL),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 3, 3, padding=1), IMAGE),
    "ConvTranspose3d": (nn.ConvTranspose3d(4, 3, 2), VOLUME),
    "MaxPool1d": (nn.MaxPool1d(3, stride=2, padding=1), SIGNAL),
    "MaxPool2d": (nn.MaxPool2d(2), IMAGE),
    "MaxPool3d": (nn.MaxPool3d(2), VOLUME),
    "AvgPool1d": (nn.AvgPool1d(3, padding=1), SIGNAL),
    "AvgPool2d": (nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False), IMAGE),
    "AvgPool3d": (nn.AvgPool3d(2), VOLUME),
    "AdaptiveAvgPool1d": (nn.AdaptiveAvgPool1d(2), SIGNAL),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d((3, 2)), IMAGE),
    "AdaptiveAvgPool2d, not a divisor": (nn.AdaptiveAvgPool2d((4, 5)), IMAGE),
    "AdaptiveAvgPool3d": (nn.AdaptiveAvgPool3d(2), VOLUME),
    "ReflectionPad1d": (nn.ReflectionPad1d((1, 2)), SIGNAL),
    "ReflectionPad2d": (nn.ReflectionPad2d(2), IMAGE),
    "ReplicationPad1d": (nn.ReplicationPad1d(2), SIGNAL),
    "ReplicationPad2d": (nn.ReplicationPad2d(1), IMAGE),
    "ReplicationPad3d": (nn.ReplicationPad3d(1), VOLUME),
    "ZeroPad2d": (nn.ZeroPad2d((1, 0, 2, -1)), IMAGE),
    "ConstantPad1d": (nn.ConstantPad1d(2, 1.5), SIGNAL),
    "ConstantPad2d": (nn.ConstantPad2d(1, 1.5), IMAGE),
    "ConstantPad3d": (nn.ConstantPad3d(1, 1.5), VOLUME),
    "Identity": (nn.Identity(), X),
    "Linear": (nn.Linear(4, 2), X),
    "Bilinear": (nn.Bilinear(4, 4, 2), X, Y),
    "Embedding": (nn.Embedding(4, 3), LABELS),
    "Embedding, padding_idx": (nn.Embedding(4, 3, padding_idx=0), LABELS),
    **{
        f"EmbeddingBag, {mode}": (nn.EmbeddingBag(4, 3, mode=mode), LABELS, torch.tensor([0, 2]))
        for mode in ("sum", "mean", "max")
    },
    "EmbeddingBag, weights": (
        lambda table, i, w: F.embedding_bag(i, table, torch.tensor([0, 2]), mode="sum", per_sample_weights=w),
        floats(4, 3),
        LABELS,
        floats(5),
    ),
    "EmbeddingBag, last offset": (
        nn.EmbeddingBag(4, 3, mode="sum", include_last_offset=True),
        LABELS,
        torch.tensor([0, 2, 5]),
    ),
    "RNN": (nn.RNN(4, 3), SEQUENCE),
    "RNN, relu": (nn.RNN(4, 3, nonlinearity="relu", batch_first=True), SEQUENCE),
    "GRU": (nn.GRU(4, 3), SEQUENCE),
    "GRU, no bias": (nn.GRU(4, 3, bias=False, batch_first=True), SEQUENCE),
    "LSTM": (nn.LSTM(4, 3), SEQUENCE),
    "LSTM, deep in both directions": (nn.LSTM(4, 3, 2, bidirectional=True, batch_first=True), SEQUENCE),
    "Dropout": (nn.Dropout(0.3), X),
    "Dropout2d": (nn.Dropout2d(0.3), IMAGE),
    "Dropout3d": (nn.Dropout3d(0.3), VOLUME),
    "BatchNorm1d": (nn.BatchNorm1d(4), SIGNAL),
    "BatchNorm2d": (nn.BatchNorm2d(4, affine=False), IMAGE),
    "BatchNorm3d": (nn.BatchNorm3d(4, track_running_stats=False), VOLUME),
    "LayerNorm": (nn.LayerNorm(4), X),
    "GroupNorm": (nn.GroupNorm(2, 4), IMAGE),
    "InstanceNorm1d": (nn.InstanceNorm1d(4), SIGNAL),
    "InstanceNorm2d": (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), IMAGE),
    "InstanceNorm3d": (nn.InstanceNorm3d(4), VOLUME),
    "weight_norm": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), X),
    **{
        f"Upsample, nearest by {factor}": (nn.Upsample(scale_factor=factor), IMAGE)
        for factor in (2, 3.5, 5.00001, 0.4357)
    },
    **{
        f"Upsample, bilinear by {factor}{', aligned' if aligned else ''}": (
            nn.Upsample(scale_factor=factor, mode="bilinear", align_corners=aligned),
            IMAGE,
        )
        for factor in (2, 5, 1.5)
        for aligned in (False, True)
    },
    "Upsample, bilinear to a size": (nn.Upsample(size=(7, 9), mode="bilinear"), IMAGE),
    "Upsample, bicubic": (nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE),
    "Upsample, linear": (nn.Upsample(scale_factor=2, mode="linear"), SIGNAL),
    "Upsample, trilinear": (nn.Upsample(scale_factor=2, mode="trilinear"), VOLUME),
    "Sequential": (nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), X),
}

_ACTIVATIONS = """CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU ReLU RReLU
SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh"""

ACTIVATIONS: dict[str, Row] = {
    **{name: (getattr(nn, name)(), X) for name in _ACTIVATIONS.split()},
    "GELU, tanh": (nn.GELU("tanh"), X),
    "GLU": (nn.GLU(), X),
    "LogSoftmax": (nn.LogSoftmax(1), X),
    "Softmax": (nn.Softmax(1), X),
    "Softmin": (nn.Softmin(1), X),
    "Threshold": (nn.Threshold(0.3, -1.0), X),
}

SIGNS = torch.tensor([1.0, -1.0, 1.0])
HALVES = floats(3, 4, low=0.1, high=0.9)

LOSSES: dict[str, Row] = {
    **{
        f"{name}, {reduction}": (getattr(nn, name)(reduction=reduction), X, Y.detach())
        for name in ("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss")
        for reduction in ("mean", "sum", "none")
    },
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), SCORES, LABELS),
    "CrossEntropyLoss, images": (nn.CrossEntropyLoss(reduction="sum"), IMAGE, integers(4, 2, 6, 6)),
    "CrossEntropyLoss, weights": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0])), SCORES, LABELS),
    "CrossEntropyLoss, ignored": (nn.CrossEntropyLoss(ignore_index=1), SCORES, LABELS),
    "CrossEntropyLoss, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), SCORES, LABELS),
    "CrossEntropyLoss, probabilities": (nn.CrossEntropyLoss(), SCORES, floats(5, 4).detach().softmax(1)),
    "NLLLoss": (nn.NLLLoss(), SCORES, LABELS),
    "NLLLoss, images": (nn.NLLLoss(reduction="sum"), IMAGE, integers(4, 2, 6, 6)),
    "BCELoss": (nn.BCELoss(), HALVES, UNIT.detach().abs()),
    "BCEWithLogitsLoss": (
        nn.BCEWithLogitsLoss(weight=torch.tensor([0.5, 1.0, 2.0, 1.0]), pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
        X,
        UNIT.detach().abs(),
    ),
    "BCEWithLogitsLoss, large": (nn.BCEWithLogitsLoss(), torch.tensor([88.0]).requires_grad_(), torch.tensor([0.5])),
    **{
        f"KLDivLoss, {reduction}{', log' if log else ''}": (
            nn.KLDivLoss(reduction=reduction, log_target=log),
            X,
            Y.detach() if log else UNIT.detach().relu(),
        )
        for reduction in ("mean", "sum", "batchmean")
        for log in (False, True)
    },
    **{
        f"PoissonNLLLoss{', log' if log else ''}{', full' if full else ''}": (
            nn.PoissonNLLLoss(log_input=log, full=full),
            POSITIVE,
            ABOVE_ONE.detach(),
        )
        for log in (False, True)
        for full in (False, True)
    },
    **{
        f"PoissonNLLLoss, sum{', log' if log else ''}{', full' if full else ''}": (
            nn.PoissonNLLLoss(log_input=log, full=full, reduction="sum"),
            POSITIVE,
            ABOVE_ONE.detach(),
        )
        for log in (False, True)
        for full in (False, True)
    },
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(margin=0.7), X, MASK.float() * 2 - 1),
    "SoftMarginLoss": (nn.SoftMarginLoss(), X, MASK.float() * 2 - 1),
    "MarginRankingLoss": (nn.MarginRankingLoss(0.2), floats(3), floats(3), SIGNS),
    "CosineEmbeddingLoss": (nn.CosineEmbeddingLoss(0.2), X, Y, SIGNS),
    **{
        f"TripletMarginLoss, {p}{', swap' if swap else ''}": (nn.TripletMarginLoss(0.5, p=p, swap=swap), X, Y, UNIT)
        for p in (2, 3)
        for swap in (False, True)
    },
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), X, MASK.float()),
}

SECTIONS: dict[str, dict[str, Row]] = {
    "creation": CREATION,
    "shaping": SHAPING,
    "random": RANDOM,
    "pointwise": POINTWISE,
    "reductions": REDUCTIONS,
    "comparisons": COMPARISONS,
    "others": OTHERS,
    "layers": LAYERS,
    "activations": ACTIVATIONS,
    "losses": LOSSES,
}
ROWS_BY_NAME: dict[str, Row] = {
    f"{section}: {name}": row for section, rows in SECTIONS.items() for name, row in rows.items()
}
