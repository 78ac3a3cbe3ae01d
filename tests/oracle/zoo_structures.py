"""Models with nested arguments and results."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from oracle.zoo import case, normal, regression
from oracle.zoo_state import Head


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Output(OrderedDict):
    """A dictionary with attributes, as libraries of models return it."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@case(lambda g: (({"x": normal(g, 3), "y": normal(g, 2), "scale": 0.5},), {}), loss=lambda r: r["loss"])
class DictInDictOut(Head):
    def forward(self, batch):
        out, loss = self.finish(batch["x"] * batch["scale"], batch["y"])
        return {"loss": loss, "logits": out, "batch": batch["x"]}


@case(lambda g: ((Pair(normal(g, 3), normal(g, 2)),), {}), loss=lambda r: r.y)
class NamedTupleInNamedTupleOut(Head):
    def forward(self, pair):
        assert isinstance(pair, Pair)
        return Pair(*self.finish(pair.x, pair.y))


@case(
    lambda g: (([normal(g, 3), (normal(g, 3), {"deep": [normal(g, 3)]})],), {"y": (normal(g, 2), None, "mean")}),
    loss=lambda r: r["all"][1][0],
)
class NestedInNestedOut(Head):
    def forward(self, inputs, y):
        first, (second, rest) = inputs
        target, nothing, reduction = y
        assert nothing is None
        out = self.fc(first + second + rest["deep"][0])
        loss = F.mse_loss(out, target, reduction=reduction)
        return {"all": (out, [loss, {"deep": (first, second)}]), "again": out}


@case(regression(3), loss=lambda r: r[0])
class NoneAndConstantsOut(Head):
    """None, numbers, strings and an empty list between the tensors; one tensor returned twice."""

    def forward(self, x, y):
        out, loss = self.finish(x, y)
        return loss, None, 3, "text", out, [], (), {"pi": 3.14, "none": None, "out": out}, True, x


@case(regression(3), loss=lambda r: r.loss)
class DictSubclassOut(Head):
    def forward(self, x, y):
        out, loss = self.finish(x, y)
        return Output(loss=loss, logits=out, hidden=(x, out))


@case(regression(3), loss=lambda r: r["loss"])
class OrderedDictOut(Head):
    def forward(self, x, y):
        out, loss = self.finish(x, y)
        return OrderedDict(z=out, loss=loss, a=out.sum())


@case(regression(3), loss=lambda r: r["loss"])
class DefaultDictInside(Head):
    def forward(self, x, y):
        totals = defaultdict(float)
        for i in range(3):
            totals[i % 2] = totals[i % 2] + x[:, i : i + 1]
        out, loss = self.finish(torch.cat([*totals.values(), x[:, :1]], 1), y)
        return {"loss": loss, "out": out, **{str(k): v for k, v in totals.items()}}


@case(regression(3), loss=lambda r: r)
class OnlyTheLoss(Head):
    def forward(self, x, y):
        return self.finish(x, y)[1]


@case(regression(3), loss=lambda r: r[0])
class ListOut(Head):
    def forward(self, x, y):
        out, loss = self.finish(x, y)
        return [loss, *out.unbind(1)]


@case(regression(3), loss=lambda r: r[0])
class ViewsOut(Head):
    """Inputs, views of inputs, parameters, views of one result, expanded values."""

    def forward(self, x, y):
        out, loss = self.finish(x, y)
        return (
            loss,
            x,
            x[:, 1],
            x.t(),
            self.fc.bias,
            self.fc.weight.t(),
            out[0],
            out.view(-1),
            loss.expand(2),
            y.detach(),
        )


@case(lambda g: ((normal(g, 3),), {"y": normal(g, 2), "mask": normal(g, 3) > 0}))
class KeywordArguments(Head):
    def forward(self, x, mask=None, bias=None, y=None):
        return self.finish(x if mask is None else x * mask, y)


class Inner(nn.Module):
    def forward(self, pair, *, scale):
        return {"x": pair[0] * scale["by"], "rest": [pair[1]]}


@case(regression(3))
class StructuresBetweenModules(Head):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x, y):
        result = self.inner((x, y), scale={"by": 2})
        return self.finish(result["x"], result["rest"][0])
