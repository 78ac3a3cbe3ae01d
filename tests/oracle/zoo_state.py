"""Models that change state in forward: buffers, tied, frozen and unused parameters, attributes of self."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from oracle.zoo import ROWS, adam, add, case, regression, tokens


class Head(nn.Module):
    """A base with one layer and the mean squared error."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 2)

    def finish(self, x, y, *extra):
        out = self.fc(x)
        return out, F.mse_loss(out, y), *extra


@case(regression(3))
class FloatBufferInPlace(Head):
    """A running mean; what is returned is its value after the update."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x, y):
        before = self.mean.clone()
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.finish(x - self.mean, y, before, self.mean)


@case(regression(3))
class IntegerBuffers(Head):
    """Counters, 0-d and with one element, of two integer types, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("rows", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("started", torch.tensor(False))

    def forward(self, x, y):
        self.count += 1
        self.rows[0] += x.shape[0]
        scale = torch.where(self.started, 1.0, 0.5)
        self.started.fill_(True)
        return self.finish(x * scale / self.count, y, self.count, self.rows, self.started)


@case(regression(3))
class ReassignedBuffer(Head):
    """`self.buffer = new`, with and without a gradient on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x, y):
        out, loss = self.finish(x, y)
        out = out + self.state
        self.state = 0.5 * self.state + 0.5 * out.mean(0)
        self.steps = self.steps + 1
        return out, loss, self.steps


@case(regression(3))
class BufferReadsAndWritesParts(Head):
    """Views, slices and index assignment of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.zeros(3, 3))

    def forward(self, x, y):
        row = self.grid[1]
        row += x.detach().mean(0)
        self.grid[:, 0] = self.grid.sum(1)
        self.grid[torch.tensor([0, 2]), torch.tensor([1, 2])] *= 0.5
        self.grid.t()[2].copy_(x[0].detach())
        return self.finish(x + self.grid.mean(0).clamp(-1, 1), y, self.grid.view(-1))


@case(regression(3))
class QueueWithPointer(Head):
    """A ring of past batches that is written at a position kept in an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(3 * ROWS, 3))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x, y):
        where = (self.position + torch.arange(x.shape[0])) % self.ring.shape[0]
        self.ring.index_copy_(0, where, x.detach())
        self.position.copy_((self.position + x.shape[0]) % self.ring.shape[0])
        return self.finish(x + self.ring.mean(0), y, self.position)


@case(regression(3))
class AverageOfWeights(Head):
    """A buffer that follows a parameter, as a teacher follows a student."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("teacher", self.fc.weight.detach().clone())

    def forward(self, x, y):
        with torch.no_grad():
            self.teacher.lerp_(self.fc.weight, 0.1)
        return self.finish(x, y + 0.1 * F.linear(x, self.teacher), self.teacher)


@case(regression(3))
class NonPersistentBuffer(Head):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x, y):
        torch.add(self.total, x.detach().sum(0), alpha=0.01, out=self.total)
        return self.finish(x + self.total, y)


@case(regression(3))
class TiedBuffers(Head):
    """One buffer under two names: a write through one is seen through the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("here", torch.zeros(3))
        self.register_buffer("there", self.here)

    def forward(self, x, y):
        self.here.add_(0.1)
        return self.finish(x + self.there, y, self.there)


@case(tokens(3, 6, target=(3, 6)), optimizer=adam)
class TiedWeights(nn.Module):
    """Input and output embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.unembed = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6)
        self.unembed.weight = self.embed.weight

    def forward(self, x, y):
        out = self.unembed(torch.tanh(self.mix(self.embed(x))))
        return out, F.mse_loss(out, y)


@case(regression(3))
class TiedModules(nn.Module):
    """One module under two names, and a parameter that is shared inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first
        self.head = nn.Linear(3, 2)
        self.head.extra = self.first.bias

    def forward(self, x, y):
        out = self.head(self.second(torch.tanh(self.first(x))) + self.head.extra)
        return out, F.mse_loss(out, y)


@case(regression(3), optimizer=adam)
class FrozenAndUnused(Head):
    """A frozen layer, a parameter that nothing uses, and one whose result is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.dropped = nn.Parameter(torch.randn(3))

    def forward(self, x, y):
        torch.exp(self.dropped)
        return self.finish(torch.tanh(self.frozen(x)), y)


def _some_parameters(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.second.parameters(), lr=0.1, momentum=0.5)  # type: ignore[union-attr]


@case(regression(3), optimizer=_some_parameters)
class NotAllParametersInTheOptimizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x, y):
        out = self.second(torch.tanh(self.first(x)))
        return out, F.mse_loss(out, y)


def _three_groups(module: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": module.first.parameters(), "lr": 0.01},  # type: ignore[union-attr]
        {"params": [module.second.weight], "weight_decay": 0.1},  # type: ignore[union-attr]
        {"params": [module.second.bias], "betas": (0.5, 0.9)},  # type: ignore[union-attr]
    ]
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.0)


add("SeveralGroups", NotAllParametersInTheOptimizer, regression(3), optimizer=_three_groups)


@case(regression(3))
class WeightsClippedInForward(Head):
    """Forward itself changes a parameter in place."""

    def forward(self, x, y):
        with torch.no_grad():
            self.fc.weight.clamp_(-0.3, 0.3)
        return self.finish(x, y)


@case(regression(3))
class WeightsClippedThroughData(Head):
    """The old way to change a parameter: through `.data`."""

    def forward(self, x, y):
        self.fc.weight.data.clamp_(-0.3, 0.3)
        self.fc.bias.data[0] = 0.0
        return self.finish(x, y)


@case(regression(3))
class WeightsReplacedThroughData(Head):
    """`.data` is assigned."""

    def forward(self, x, y):
        self.fc.weight.data = F.normalize(self.fc.weight.data, dim=1)
        return self.finish(x, y)


@case(regression(3))
class TransposedParameter(Head):
    """A parameter and a buffer that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 3).t()[:, :3])
        self.register_buffer("shift", torch.zeros(3, 2).t()[0])

    def forward(self, x, y):
        self.shift.add_(0.01)
        return self.finish(x @ self.mix + self.shift, y)


@case(regression(3))
class ScalarParameter(Head):
    """0-d and 1-element parameters, and lists and dictionaries of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3))])
        self.scales = nn.ParameterDict({"a": torch.ones(3)})

    def forward(self, x, y):
        for shift in self.shifts:
            x = x + shift
        return self.finish(torch.tanh(x * self.gain * self.scales["a"]), y, self.gain)


@case(regression(3))
class StoresTensorsOnSelf(Head):
    """Activations kept on self and read again in the same forward, also in a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, torch.Tensor] = {}
        self.history: list[torch.Tensor] = []

    def encode(self, x):
        self.hidden = torch.tanh(x)
        self.cache["x"] = x
        self.history = [x, self.hidden]

    def forward(self, x, y):
        self.encode(x)
        return self.finish(self.hidden + self.cache["x"] + self.history[1], y, self.hidden)


@case(regression(3))
class LazyCache(Head):
    """A table that is computed by the first forward and kept on self."""

    def __init__(self) -> None:
        super().__init__()
        self._angles = None

    def forward(self, x, y):
        if self._angles is None or self._angles.shape[0] < x.shape[1]:
            self._angles = torch.sin(torch.arange(x.shape[1], dtype=x.dtype))
        return self.finish(x * self._angles, y)


@case(regression(3))
class PlainTensorAttribute(Head):
    """A tensor that is neither parameter nor buffer is a constant; it can also be returned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([1.0, 2.0, 3.0])
        self.index = torch.tensor([2, 0, 1])

    def forward(self, x, y):
        return self.finish((x * self.scale)[:, self.index], y, self.scale)


@case(regression(3))
class ModuleListsAndDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})

    def forward(self, x, y):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        out = {name: head(x) for name, head in self.heads.items()}
        return out, F.mse_loss(out["a"] + out["b"], y)
