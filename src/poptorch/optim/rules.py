"""Update rules: what an optimiser does to one parameter group, written as pure tensor functions that can be traced.

A rule is a frozen value. Its fields are the facts that shape the program (is there momentum? is it nesterov?); the
numbers that may change between calls (`lr`, `momentum`, …) are its `hypers` and reach `update` as 0-d float64 tensors.
State has torch's own names and layout, so a state dictionary can move to plain PyTorch and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, list[Tensor]]
Hypers = dict[str, Tensor]


@dataclass(frozen=True)
class Rule(ABC):
    """How one parameter group is updated."""

    maximize: bool

    @property
    @abstractmethod
    def hypers(self) -> tuple[str, ...]:
        """The names of the numbers that may change without compiling again."""

    @property
    @abstractmethod
    def state(self) -> tuple[str, ...]:
        """The state tensors that each parameter has, named as torch names them; all have the parameter's shape."""

    @property
    def counts_steps(self) -> bool:
        """Whether torch keeps a `step` counter for each parameter."""
        return False

    @property
    def needs_started(self) -> bool:
        """Whether the first update of a parameter differs, so that `update` must know which have been updated."""
        return False

    @abstractmethod
    def update(
        self, params: list[Tensor], grads: list[Tensor], state: State, counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], State]:
        """New parameters and new state. `counter` holds one number per parameter: its steps, this one included."""

    def _ascent(self, grads: list[Tensor]) -> list[Tensor]:
        return [-grad for grad in grads] if self.maximize else grads


@dataclass(frozen=True)
class SGD(Rule):
    """torch.optim.SGD."""

    momentum: bool
    dampening: bool
    weight_decay: bool
    nesterov: bool

    @property
    def hypers(self) -> tuple[str, ...]:
        optional = ("momentum", "dampening", "weight_decay")
        return ("lr", *(name for name in optional if getattr(self, name)))

    @property
    def state(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def needs_started(self) -> bool:
        return self.momentum and self.dampening  # torch does not dampen the gradient that starts the buffer

    def update(
        self, params: list[Tensor], grads: list[Tensor], state: State, counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], State]:
        directions = self._ascent(grads)
        if self.weight_decay:
            directions = [d + _like(hypers["weight_decay"], p) * p for d, p in zip(directions, params, strict=True)]
        buffers: list[Tensor] = []
        if self.momentum:
            for index, (d, buffer) in enumerate(zip(directions, state["momentum_buffer"], strict=True)):
                momentum = _like(hypers["momentum"], d)
                taken = d
                if self.dampening:
                    assert counter is not None
                    dampening = torch.where(counter[index] > 1, hypers["dampening"], 0.0)
                    taken = _like(1 - dampening, d) * d
                buffers.append(momentum * buffer + taken)
            if self.nesterov:
                momentum = hypers["momentum"]
                directions = [d + _like(momentum, d) * b for d, b in zip(directions, buffers, strict=True)]
            else:
                directions = buffers
        new = [p - _like(hypers["lr"], p) * d for p, d in zip(params, directions, strict=True)]
        return new, ({"momentum_buffer": buffers} if self.momentum else {})


@dataclass(frozen=True)
class Adam(Rule):
    """torch.optim.Adam, and torch.optim.AdamW when the weight decay is decoupled."""

    weight_decay: bool
    decoupled: bool
    amsgrad: bool

    @property
    def hypers(self) -> tuple[str, ...]:
        return ("lr", "beta1", "beta2", "eps", *(("weight_decay",) if self.weight_decay else ()))

    @property
    def state(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    @property
    def counts_steps(self) -> bool:
        return True

    def update(
        self, params: list[Tensor], grads: list[Tensor], state: State, counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], State]:
        assert counter is not None
        lr, beta1, beta2, eps = (hypers[name] for name in ("lr", "beta1", "beta2", "eps"))
        # In float64: 1 - 0.999 ** t loses five digits in float32. Written with exp, which Inductor computes once
        # into a small buffer instead of once for every element of every parameter.
        steps = counter.double()
        step_size = lr / (1 - torch.exp(steps * torch.log(beta1)))
        root_correction = torch.sqrt(1 - torch.exp(steps * torch.log(beta2)))
        new_params: list[Tensor] = []
        new_state: State = {name: [] for name in self.state}
        for index, (p, g) in enumerate(zip(params, self._ascent(grads), strict=True)):
            if self.weight_decay:
                decay = hypers["weight_decay"]
                if self.decoupled:
                    p = p * _like(1 - lr * decay, p)
                else:
                    g = g + _like(decay, p) * p
            m, v = state["exp_avg"][index], state["exp_avg_sq"][index]
            m = m + _like(1 - beta1, m) * (g - m)
            v = _like(beta2, v) * v + _like(1 - beta2, v) * (g * g)
            new_state["exp_avg"].append(m)
            new_state["exp_avg_sq"].append(v)
            if self.amsgrad:
                v = torch.maximum(state["max_exp_avg_sq"][index], v)
                new_state["max_exp_avg_sq"].append(v)
            denominator = v.sqrt() / _like(root_correction[index], v) + _like(eps, v)
            new_params.append(p - _like(step_size[index], p) * (m / denominator))
        return new_params, new_state


@dataclass(frozen=True)
class RMSprop(Rule):
    """torch.optim.RMSprop."""

    momentum: bool
    weight_decay: bool
    centered: bool

    @property
    def hypers(self) -> tuple[str, ...]:
        return ("lr", "alpha", "eps", *(name for name in ("momentum", "weight_decay") if getattr(self, name)))

    @property
    def state(self) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if self.momentum else ()
        return ("square_avg", *momentum, *(("grad_avg",) if self.centered else ()))

    @property
    def counts_steps(self) -> bool:
        return True

    def update(
        self, params: list[Tensor], grads: list[Tensor], state: State, counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], State]:
        lr, alpha, eps = (hypers[name] for name in ("lr", "alpha", "eps"))
        new_params: list[Tensor] = []
        new_state: State = {name: [] for name in self.state}
        for index, (p, g) in enumerate(zip(params, self._ascent(grads), strict=True)):
            if self.weight_decay:
                g = g + _like(hypers["weight_decay"], p) * p
            square = state["square_avg"][index]
            square = _like(alpha, square) * square + _like(1 - alpha, square) * (g * g)
            new_state["square_avg"].append(square)
            variance = square
            if self.centered:
                mean = state["grad_avg"][index]
                mean = mean + _like(1 - alpha, mean) * (g - mean)
                new_state["grad_avg"].append(mean)
                variance = square - mean * mean
            step = g / (variance.sqrt() + _like(eps, p))
            if self.momentum:
                step = _like(hypers["momentum"], p) * state["momentum_buffer"][index] + step
                new_state["momentum_buffer"].append(step)
            new_params.append(p - _like(lr, p) * step)
        return new_params, new_state


def _like(number: Tensor, tensor: Tensor) -> Tensor:
    """A 0-d float64 number in the dtype of the tensor it is about to meet."""
    return number.to(tensor.dtype)
