"""Models that reach their parameters and buffers by another way than their attributes."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from oracle.zoo import case, regression

WithCount = regression(3)


class Counted(nn.Module):
    """A layer and a buffer; subclasses say what happens to an input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.body(x)
        return out, F.mse_loss(out, y)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@case(WithCount)
class ParametersInAList(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.decayed, self.counts = [self.fc.weight], [self.count]

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.counts[0].add_(1)
        return F.linear(x, self.decayed[0]) + self.counts[0] * 0.1 + self.fc(x)


@case(WithCount)
class ParametersInNestedContainers(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"weight": self.fc.weight, "inner": {"count": (self.count,)}}

    def body(self, x: torch.Tensor) -> torch.Tensor:
        (count,) = self.kept["inner"]["count"]
        count += 1
        return F.linear(x, self.kept["weight"]) + self.fc.weight.sum() + self.count


@case(WithCount)
class ParametersInAClosure(Counted):
    def __init__(self) -> None:
        super().__init__()
        weight, count = self.fc.weight, self.count

        def layer(x: torch.Tensor) -> torch.Tensor:
            count.mul_(0.5).add_(x.mean())
            return F.linear(x, weight) * 2 + count

        self.layer = layer

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@case(WithCount)
class ParametersInAPartial(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.layer = functools.partial(F.linear, weight=self.fc.weight, bias=self.fc.bias)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@case(WithCount)
class ParametersOfAPlainObject(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.holder = SimpleNamespace(weight=self.fc.weight, count=self.count)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.holder.count += 1
        return F.linear(x, self.holder.weight) + self.holder.count


@case(WithCount)
class ParameterOfADistribution(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(2))
        self.prior = Normal(self.mean, 1.0, validate_args=False)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + self.prior.log_prob(self.fc(x)).mean()


@case(WithCount)
class ViewsMadeBefore(Counted):
    """Gradients flow through views, and not through detached ones; writes to a part reach the whole."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.fc.weight
        self.views = [weight.t(), weight[0], weight.detach().view(-1), self.count[:1]]

    def body(self, x: torch.Tensor) -> torch.Tensor:
        transposed, row, fixed, first = self.views
        first.add_(1)
        return x @ transposed + row.sum() + fixed.sum() + self.count


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return gradient * 3 * weight**2


@case(WithCount)
class ParameterPastAFunction(Counted):
    """An autograd function takes its arguments without torch's overrides."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.fc.weight]

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, Cube.apply(self.weights[0])) + F.linear(x, self.fc.weight)


@case(WithCount)
class ReturnsWhatAListHolds(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.fc.weight, self.count]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.kept[1].add_(1)
        out = self.fc(x)
        return out, F.mse_loss(out, y), self.kept[0], self.kept[1]


@case(WithCount)
class UnregisteredBatchNorm(Counted):
    """Its weights are constants; what it does to its statistics concerns nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = [nn.BatchNorm1d(2)]

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.norms[0](self.fc(x))
