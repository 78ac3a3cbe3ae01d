"""Models that let Python decide, and models that compute with indices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from oracle.zoo import ROWS, Supervised, adam, add, case, classification, integers, normal, regression
from oracle.zoo_state import Head


@case(regression(3))
class BranchOnShape(Head):
    def forward(self, x, y):
        if x.shape[0] > 100 or x.dim() != 2 or x.size(-1) % 2 == 0:
            x = x * 100
        for i in range(len(x)):
            x = x + i * 0.01
        return self.finish(x.view(x.shape[0], -1), y)


@case(lambda g: ((normal(g, 3), normal(g, 2)), {"kind": "square", "times": 2, "bias": None, "scale": 0.5}))
class BranchOnArguments(Head):
    """Strings, numbers, None and defaults as arguments."""

    def forward(self, x, y, kind="plain", times=1, *, bias, scale, flag=True):
        for _ in range(times):
            x = x * x if kind == "square" else x
        if bias is not None or not flag:
            x = x + 1000
        return self.finish(torch.tanh(x) * scale, y)


@case(lambda g: ((normal(g, 3), normal(g, 3), normal(g, 2)), {"extra": normal(g, 3)}))
class StarArguments(Head):
    def forward(self, *tensors, **named):
        *inputs, y = tensors
        return self.finish(sum(inputs) + named["extra"] + named.get("missing", 0), y)


@case(regression(3))
class IsParameter(Head):
    def forward(self, x, y):
        assert isinstance(self.fc.weight, nn.Parameter)
        count = sum(isinstance(p, nn.Parameter) for p in self.parameters())
        names = [name for name, _ in self.named_parameters()]
        assert names == ["fc.weight", "fc.bias"]
        decay = sum(p.pow(2).sum() for p in self.parameters() if isinstance(p, nn.Parameter))
        out, loss = self.finish(x * count, y)
        return out, loss, decay


def _positive(g: torch.Generator):
    return (normal(g, 3).abs() + 0.1, normal(g, 2)), {}


@case(_positive)
class BranchOnData(Head):
    """Python reads values, and every batch gives the same answer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.tensor(2.0))

    def forward(self, x, y):
        assert torch.isfinite(x).all(), "input is broken"
        if x.sum() > 0:
            x = x * 2
        if x.min() < 0 or self.limit.item() != 2:
            x = x - 100
        return self.finish(x, y)


def _half_masked(g: torch.Generator):
    mask = torch.zeros(ROWS, 4, dtype=torch.bool)
    for row in mask:
        row[torch.randperm(4, generator=g)[:2]] = True
    return (normal(g, 4), mask, normal(g, 2)), {}


@case(_half_masked)
class MaskWithFixedCount(nn.Module):
    """The mask differs from batch to batch, the number of selected elements does not."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.fc = nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, x, mask, y):
        chosen = self.mix(x)[mask].view(-1, 2)
        rows = x[mask.any(1)]
        others = torch.masked_select(x, ~mask).view(-1, 2)
        where = mask.nonzero()
        x = x.clone()
        x[mask] *= 2
        out = self.fc(chosen + others + rows[:, :2] + x[:, 2:]) + where[:, 1].view(-1, 2)
        return out, F.mse_loss(out, y), where


@case(_half_masked)
class MaskedAssignment(nn.Module):
    """Assignment under a mask works for any count."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.fc = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, mask, y):
        x = self.mix(x)
        x[mask] = 0
        x[x > 1] = 1.0
        out = self.fc(torch.where(mask, x, x.flip(1)))
        return out, F.mse_loss(out, y)


@case(lambda g: ((normal(g, 4), integers(g, 4, 4), normal(g, 2)), {}))
class IndexOps(nn.Module):
    """cumsum, gather, scatter_add, index_add, einsum, take_along_dim, roll, tril."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mix = nn.Linear(4, 2), nn.Parameter(torch.randn(4, 4, 2) * 0.3)

    def forward(self, x, index, y):
        gathered = x.cumsum(1).gather(1, index)
        spread = torch.zeros_like(x).scatter_add(1, index, self.fc.weight[0] * x)
        added = torch.zeros(4, x.shape[0]).index_add(0, index[0], x.t()).t()
        lower = torch.tril(torch.ones(4, 4)) @ (x + torch.roll(x, 1, 1)).unsqueeze(-1)
        both = torch.einsum("bi,ijk,bj->bk", x, self.mix, gathered)
        total = spread + added + lower.squeeze(-1) + torch.take_along_dim(x, index, 1)
        out = self.fc(torch.tanh(total)) + torch.tanh(both)
        return out, F.mse_loss(out, y), gathered


@case(regression(5))
class SortAndTopk(nn.Module):
    """Orders are returned as integers; argmax, unique shapes, searchsorted and bucketize too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 2)

    def forward(self, x, y):
        ordered, order = x.sort(1, descending=True)
        best, where = x.topk(2, 1)
        out = self.fc(ordered + x.flip(1).cummax(1).values) + best
        bins = torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]))
        return out, F.mse_loss(out, y), order, where, out.argmax(1), bins, x > 0


@case(classification(4), optimizer=adam)
class OneHot(nn.Module):
    """one_hot looks at the values to check them; any label must stay possible."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x, label):
        out = self.fc(x).log_softmax(1)
        return out, F.kl_div(out, F.one_hot(label, 3).float() * 0.9 + 0.1 / 3, reduction="batchmean")


@case(classification(4))
class IntegerArithmetic(nn.Module):
    """Integers, floor division, remainders, shifts, bit operations, comparisons."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, x, label):
        code = ((label * 5 + 3) // 2) % 8
        code = (code << 1 ^ 5) & 7
        out = self.fc(x + self.table(code))
        right = (out.argmax(-1) == label).sum()
        return out, F.cross_entropy(out, label), code, right, right / label.numel(), label


@case(regression(3))
class RepeatAndExpand(Head):
    def forward(self, x, y):
        wide = x.repeat_interleave(2, dim=1).unfold(1, 3, 3)
        x = torch.stack([t.squeeze(1) for t in wide.split(1, 1)], -1).mean(-1)
        x = x + x.new_ones(1).expand_as(x) + torch.arange(3.0) + torch.linspace(0, 1, 3)
        return self.finish(torch.tanh(x), y)


@case(regression(3))
class ComputesWithNumbers(Head):
    """Tensors made from Python numbers and lists inside forward."""

    def forward(self, x, y):
        scale = torch.tensor([0.5, 1.0, 2.0]) * torch.as_tensor(0.5)
        shift = torch.full((3,), 0.25).fill_(0.5)
        shift[1] = 1.5
        table = torch.zeros(3, 3)
        table[torch.arange(3), torch.LongTensor([1, 2, 0])] = 1.0
        return self.finish((x * scale + shift) @ table, y)


@case(lambda g: ((normal(g, 3).t().contiguous().t(), normal(g, 2)), {}))
class NonContiguousInput(Head):
    def forward(self, x, y):
        return self.finish(x.contiguous().view(-1).view_as(x), y)


@case(regression(3))
class InputChangedInPlace(Head):
    """The caller's tensor changes too."""

    def forward(self, x, y):
        x.mul_(2)
        x[:, 0] += 1
        return self.finish(x, y)


@case(lambda g: ((normal(g, 3).double(), normal(g, 2), (normal(g) > 0), integers(g, 3).to(torch.int16)), {}))
class NarrowAndWideTypes(Head):
    """float64, bool and int16 inputs."""

    def forward(self, x, y, flag, small):
        x = x.float() * flag.unsqueeze(1) + small.unsqueeze(1)
        return self.finish(torch.tanh(x), y, small + 1, flag.logical_not(), small.long())


class Overridden(Head):
    def forward(self, x, y):
        raise AssertionError("this forward was replaced")


def _forward_on_the_instance() -> nn.Module:
    module = Overridden()
    module.forward = lambda x, y: module.finish(x, y)  # type: ignore[method-assign]
    return module


add("ForwardReplacedOnInstance", _forward_on_the_instance, regression(3))
add("DataParallel", lambda: nn.DataParallel(Supervised(nn.Linear(3, 2))), regression(3))
