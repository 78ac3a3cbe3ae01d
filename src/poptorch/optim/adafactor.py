"""The rule of torch.optim.Adafactor, whose own step() reads numbers back to Python and cannot be captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from poptorch.errors import OptimizerError, explain
from poptorch.optim.rules import Hypers, Rule, State


@dataclass(frozen=True, kw_only=True)
class Adafactor(Rule):
    """Second moments of a matrix are kept as one vector per dimension; a vector has its own."""

    weight_decay: bool
    has_eps1: bool  # otherwise it is the smallest step of the parameter's type

    @property
    def hypers(self) -> tuple[str, ...]:
        optional = (*(("eps1",) if self.has_eps1 else ()), *(("weight_decay",) if self.weight_decay else ()))
        return ("lr", "beta2_decay", "eps2", "d", *optional)

    @property
    def state(self) -> tuple[str, ...]:
        return ()  # depends on the parameter: see initial_state

    @property
    def counts_steps(self) -> bool:
        return True

    def initial_state(self, parameter: Tensor, values: Mapping[str, float]) -> State:
        if parameter.is_complex():
            raise OptimizerError(
                explain("Adafactor does not support complex parameters.", fix="use another optimiser, such as Adam")
            )
        if parameter.dim() < 2:
            return {"variance": torch.zeros_like(parameter)}
        shape = parameter.shape
        return {
            "row_var": parameter.new_zeros((*shape[:-1], 1)),
            "col_var": parameter.new_zeros((*shape[:-2], 1, shape[-1])),
        }

    def update(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], list[State]]:
        assert counter is not None
        lr, steps = hypers["lr"], counter.double()
        forgets = steps ** hypers["beta2_decay"]
        rates = torch.minimum(lr, 1 / steps.sqrt())
        new_params: list[Tensor] = []
        new_states: list[State] = []
        for index, (p, g, state) in enumerate(zip(params, self._ascent(grads), states, strict=True)):
            alpha = torch.maximum(hypers["eps2"], _root_mean_square(p)) * rates[index]
            if self.weight_decay:
                p = p * (1 - lr * hypers["weight_decay"]).to(p.dtype)
            new, variance = _variance(g, state, forgets[index].to(g.dtype), self._eps1(p, hypers))
            direction = variance.clamp(min=self._eps1(p, hypers) ** 2).rsqrt() * g
            denominator = torch.clamp(_root_mean_square(direction) / hypers["d"], min=1.0)
            new_params.append(p - (alpha / denominator).to(p.dtype) * direction)
            new_states.append(new)
        return new_params, new_states

    def _eps1(self, parameter: Tensor, hypers: Hypers) -> Tensor:
        if self.has_eps1:
            return hypers["eps1"].to(parameter.dtype)
        return torch.full((), torch.finfo(parameter.dtype).eps, dtype=parameter.dtype)


def _root_mean_square(tensor: Tensor) -> Tensor:
    return tensor.norm().double() / tensor.numel() ** 0.5


def _variance(grad: Tensor, state: State, forget: Tensor, eps: Tensor) -> tuple[State, Tensor]:
    """The new state, and the second moment that it stands for."""
    square = grad * grad
    if "variance" in state:
        variance = state["variance"] + forget * (square - state["variance"])
        return {"variance": variance}, variance
    row = state["row_var"] + forget * (square.mean(-1, keepdim=True) - state["row_var"])
    col = state["col_var"] + forget * (square.mean(-2, keepdim=True) - state["col_var"])
    return {"row_var": row, "col_var": col}, row * col / row.mean(-2, keepdim=True).clamp(min=eps)
