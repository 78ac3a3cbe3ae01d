"""Update rules: what an optimiser does to one parameter group, written as pure tensor functions that can be traced.

A rule is a frozen value. Its fields are the facts that shape the program (is there momentum? is it nesterov?); the
numbers that may change between calls (`lr`, `momentum`, …) are its `hypers` and reach `update` as 0-d float64 tensors.
State has torch's own names and layout, so a state dictionary can move to plain PyTorch and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from poptorch.errors import OptimizerError, explain

State = dict[str, Tensor]  # of one parameter
Hypers = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """How one parameter group is updated."""

    maximize: bool = False
    # PopTorch's own optimisers choose the types of their state and compute in float32, whatever a parameter's type is;
    # the state of torch's has the type of the parameter.
    state_types: tuple[tuple[str, torch.dtype], ...] | None = field(default=None, compare=False, repr=False)

    @property
    @abstractmethod
    def hypers(self) -> tuple[str, ...]:
        """The names of the numbers that may change without compiling again."""

    @property
    @abstractmethod
    def state(self) -> tuple[str, ...]:
        """The state tensors that each parameter has, named as torch names them."""

    def wide(self, tensor: Tensor) -> Tensor:
        """A tensor in the type that it is computed with: in 16 bits `eps` and small steps would be lost."""
        if tensor.is_complex():
            return tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor
        is_wide = self.state_types is None and tensor.dtype not in (torch.float16, torch.bfloat16)
        return tensor if is_wide else tensor.float()

    @property
    def counts_steps(self) -> bool:
        """Whether torch keeps a `step` counter for each parameter."""
        return False

    @property
    def needs_started(self) -> bool:
        """Whether the first update of a parameter differs, so that `update` must know which have been updated."""
        return False

    def initial_state(self, parameter: Tensor, values: Mapping[str, float]) -> State:
        """The state of a parameter before its first update, if the hypers have these values."""
        types = {name: kept_as(dtype, parameter.dtype) for name, dtype in self.state_types or ()}
        return {name: torch.zeros_like(parameter, dtype=types.get(name, parameter.dtype)) for name in self.state}

    def expected_state(self, parameter: Tensor, values: Mapping[str, float]) -> State:
        """What the state of a parameter looks like: names, shapes and types count, values do not."""
        return self.initial_state(parameter, values)

    def penalised(self, params: list[Tensor], grads: list[Tensor], hypers: Hypers) -> list[Tensor]:
        """The gradients as they count for a limit on their norm."""
        return grads

    def apply(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], list[State]]:
        """`update`, in which a complex number is a pair of real ones, as in torch's optimisers."""
        pairs = [{key: _as_pairs(value) for key, value in state.items()} for state in states]
        new_params, new_states = self.update(
            [_as_pairs(p) for p in params], [_as_pairs(grad) for grad in grads], pairs, counter, hypers
        )
        return (
            [_as_before(new, p) for new, p in zip(new_params, params, strict=True)],
            [
                {key: _as_before(value, state[key]) for key, value in new.items()}
                for new, state in zip(new_states, states, strict=True)
            ],
        )

    @abstractmethod
    def update(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], list[State]]:
        """New parameters and new state, all of them real, from penalised gradients.

        `counter` holds one number per parameter: its steps, this one included.
        """

    def _ascent(self, grads: list[Tensor]) -> list[Tensor]:
        return [-grad for grad in grads] if self.maximize else grads


def kept_as(dtype: torch.dtype, like: torch.dtype) -> torch.dtype:
    """The type of something that belongs to a tensor of type `like` and is to be kept in `dtype`, which is real."""
    if not like.is_complex:
        return dtype
    if dtype == torch.float16:
        raise OptimizerError(
            explain(
                f"what belongs to a parameter of {like} cannot be kept in float16.",
                fix="use torch.float32 for the accum_type arguments of the optimiser, or parameters that are real",
            )
        )
    return dtype.to_complex()


def _as_pairs(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_before(new: Tensor, given: Tensor) -> Tensor:
    return torch.complex(*new.unbind(-1)) if given.is_complex() else new  # whatever the memory layout of `new` is


@dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    """torch.optim.SGD; and PopTorch's, which dampens always: the first gradient, and also without momentum."""

    momentum: bool
    dampening: bool
    weight_decay: bool
    nesterov: bool
    always_dampens: bool = False

    @property
    def hypers(self) -> tuple[str, ...]:
        optional = ("momentum", "dampening", "weight_decay")
        return ("lr", *(name for name in optional if getattr(self, name)))

    @property
    def state(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def needs_started(self) -> bool:  # torch does not dampen the gradient that starts the buffer
        return self.momentum and self.dampening and not self.always_dampens

    def update(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], list[State]]:
        like = Casts()
        new_params: list[Tensor] = []
        new_states: list[State] = []
        for index, (p, g, state) in enumerate(zip(params, self._ascent(grads), states, strict=True)):
            if self.weight_decay:
                g = g + like(hypers["weight_decay"], p) * p
            taken = (1 - self._dampening(counter, index, hypers)).to(g.dtype) * g if self.dampening else g
            if not self.momentum:
                new_states.append({})
                new_params.append(p - like(hypers["lr"], p) * taken)
                continue
            momentum = like(hypers["momentum"], g)
            velocity = momentum * state["momentum_buffer"] + taken
            new_states.append({"momentum_buffer": velocity})
            direction = g + momentum * velocity if self.nesterov else velocity
            new_params.append(p - like(hypers["lr"], p) * direction)
        return new_params, new_states

    def _dampening(self, counter: Tensor | None, index: int, hypers: Hypers) -> Tensor:
        if self.always_dampens:
            return hypers["dampening"]
        assert counter is not None
        return torch.where(counter[index] > 1, hypers["dampening"], 0.0)


@dataclass(frozen=True, kw_only=True)
class CombinedSGD(Rule):
    """PopTorch's SGD with `use_combined_accum`: one tensor is both gradient accumulator and velocity.

    Momentum and decay for the next update are folded in at the end of this one, so a change of them shows one update
    late. The buffer is scaled by the velocity scaling.
    """

    nesterov: bool

    @property
    def hypers(self) -> tuple[str, ...]:
        return ("lr", "momentum", "dampening", "weight_decay", "velocity_scaling")

    @property
    def state(self) -> tuple[str, ...]:
        return ("combined_accumulator",)

    def initial_state(self, parameter: Tensor, values: Mapping[str, float]) -> State:
        scale = (1 - values["dampening"]) * values["weight_decay"] * values["velocity_scaling"]
        return {"combined_accumulator": parameter.detach() * scale}

    def update(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], list[State]]:
        scaling = hypers["velocity_scaling"]
        gain = (1 - hypers["dampening"]) * scaling
        rate, decay = hypers["lr"] / scaling, gain * hypers["weight_decay"]
        like = Casts()
        new_params: list[Tensor] = []
        new_states: list[State] = []
        for p, g, state in zip(params, self._ascent(grads), states, strict=True):
            velocity = state["combined_accumulator"] + like(gain, g) * g
            direction = velocity
            if self.nesterov:
                decayed = like(scaling, g) * (g + like(hypers["weight_decay"], p) * p)
                direction = decayed + like(hypers["momentum"], p) * velocity
            new = p - like(rate, p) * direction
            carried = like(hypers["momentum"], p) * velocity + like(decay, p) * new
            new_params.append(new)
            new_states.append({"combined_accumulator": carried})
        return new_params, new_states


@dataclass(frozen=True, kw_only=True)
class Adam(Rule):
    """torch.optim.Adam, and torch.optim.AdamW when the weight decay is decoupled."""

    weight_decay: bool
    decoupled: bool
    amsgrad: bool = False

    @property
    def hypers(self) -> tuple[str, ...]:
        return ("lr", "beta1", "beta2", "eps", *(("weight_decay",) if self.weight_decay else ()))

    @property
    def state(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    @property
    def counts_steps(self) -> bool:
        return True

    def penalised(self, params: list[Tensor], grads: list[Tensor], hypers: Hypers) -> list[Tensor]:
        grads, like = self._ascent(grads), Casts()
        if not self.weight_decay or self.decoupled:
            return grads
        return [g + like(hypers["weight_decay"], p) * p for p, g in zip(params, grads, strict=True)]

    def update(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], list[State]]:
        assert counter is not None
        lr, eps = hypers["lr"], hypers["eps"]
        correction1, correction2 = bias_corrections(counter, hypers)
        step_size, root_correction = lr / correction1, torch.sqrt(correction2)
        like, rates = Casts(), moment_rates(hypers)
        decays = self.weight_decay and self.decoupled
        kept = 1 - lr * hypers["weight_decay"] if decays else lr
        new_params: list[Tensor] = []
        new_states: list[State] = []
        for index, (p, g, state) in enumerate(zip(params, grads, states, strict=True)):
            if decays:
                p = p * like(kept, p)
            m, v = moments(g, state, rates, like)
            new = {"exp_avg": m, "exp_avg_sq": v}
            if self.amsgrad:
                v = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], v)
            denominator = v.sqrt() / like(root_correction, v)[index] + like(eps, v)
            new_params.append(p - like(step_size, p)[index] * (m / denominator))
            new_states.append(new)
        return new_params, new_states


@dataclass(frozen=True, kw_only=True)
class LAMB(Rule):
    """PopTorch's LAMB: AdamW's direction, scaled for each parameter by the ratio of its norm to the direction's."""

    bias_correction: bool

    @property
    def hypers(self) -> tuple[str, ...]:
        return ("lr", "beta1", "beta2", "eps", "weight_decay", "max_weight_norm")

    @property
    def state(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @property
    def counts_steps(self) -> bool:
        return True

    def update(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], list[State]]:
        assert counter is not None
        correction1, correction2 = bias_corrections(counter, hypers)
        root_correction = torch.sqrt(correction2)
        like, rates = Casts(), moment_rates(hypers)
        new_params: list[Tensor] = []
        new_states: list[State] = []
        for index, (p, g, state) in enumerate(zip(params, self._ascent(grads), states, strict=True)):
            m, v = moments(g, state, rates, like)
            mean, root = m, v.sqrt()
            if self.bias_correction:
                mean = m / like(correction1, m)[index]
                root = root / like(root_correction, v)[index]
            direction = mean / (root + like(hypers["eps"], v)) + like(hypers["weight_decay"], p) * p
            limit = like(hypers["max_weight_norm"], p)
            weight_norm, norm = p.norm(), direction.norm()
            has_ratio = (weight_norm > 0) & (norm > 0) & (limit > 0)
            trust = torch.where(has_ratio, torch.minimum(weight_norm, limit) / norm, 1.0)
            new_params.append(p - like(hypers["lr"], p) * trust * direction)
            new_states.append({"exp_avg": m, "exp_avg_sq": v})
        return new_params, new_states


@dataclass(frozen=True, kw_only=True)
class RMSprop(Rule):
    """torch.optim.RMSprop; and TensorFlow's variant of it."""

    momentum: bool
    weight_decay: bool
    centered: bool
    as_tensorflow: bool = False  # the average starts at one, eps is under the root, momentum collects lr as well

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

    def initial_state(self, parameter: Tensor, values: Mapping[str, float]) -> State:
        state = super().initial_state(parameter, values)
        if self.as_tensorflow:
            _as_pairs(state["square_avg"]).fill_(1.0)
        return state

    def update(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], list[State]]:
        lr, alpha, eps = (hypers[name] for name in ("lr", "alpha", "eps"))
        like, forgets = Casts(), 1 - alpha
        new_params: list[Tensor] = []
        new_states: list[State] = []
        for p, g, state in zip(params, self._ascent(grads), states, strict=True):
            if self.weight_decay:
                g = g + like(hypers["weight_decay"], p) * p
            square = state["square_avg"]
            square = like(alpha, square) * square + like(forgets, square) * (g * g)
            new = {"square_avg": square}
            variance = square
            if self.centered:
                mean = state["grad_avg"]
                mean = new["grad_avg"] = mean + like(forgets, mean) * (g - mean)
                variance = square - mean * mean
            if self.as_tensorflow:
                step = like(lr, p) * (g / (variance + like(eps, p)).sqrt())
            else:
                step = g / (variance.sqrt() + like(eps, p))
            if self.momentum:
                step = like(hypers["momentum"], p) * state["momentum_buffer"] + step
                new["momentum_buffer"] = step
            new_params.append(p - (step if self.as_tensorflow else like(lr, p) * step))
            new_states.append(new)
        return new_params, new_states


def bias_corrections(counter: Tensor, hypers: Hypers) -> tuple[Tensor, Tensor]:
    """`1 - beta ** t` for both betas and every parameter.

    In float64: 1 - 0.999 ** t loses five digits in float32. Written with exp, which Inductor computes once into a
    small buffer instead of once for every element of every parameter.
    """
    steps = counter.double()
    beta1, beta2 = (1 - torch.exp(steps * torch.log(hypers[name])) for name in ("beta1", "beta2"))
    return beta1, beta2


def moment_rates(hypers: Hypers) -> tuple[Tensor, Tensor, Tensor]:
    """What `moments` multiplies with, computed once for all parameters."""
    return 1 - hypers["beta1"], hypers["beta2"], 1 - hypers["beta2"]


def moments(grad: Tensor, state: State, rates: tuple[Tensor, Tensor, Tensor], like: Casts) -> tuple[Tensor, Tensor]:
    """The running averages of the gradient and of its square."""
    m, v = state["exp_avg"], state["exp_avg_sq"]
    forgets, keeps_square, forgets_square = rates
    m = m + like(forgets, m) * (grad - m)
    v = like(keeps_square, v) * v + like(forgets_square, v) * (grad * grad)
    return m, v


class Casts:
    """`like(number, tensor)`: a float64 number in the dtype of the tensor it is about to meet, converted only once.

    With hundreds of parameters these conversions would be most of the ops of an update.
    """

    def __init__(self) -> None:
        self._done: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, number: Tensor, tensor: Tensor) -> Tensor:
        key = (id(number), tensor.dtype)
        if key not in self._done:
            self._done[key] = (number, number.to(tensor.dtype))  # the number is kept so that its id stays its own
        return self._done[key][1]


PLAIN = frozenset({SGD, CombinedSGD, Adam, RMSprop})  # no tensors from numbers, except in a first update that differs
