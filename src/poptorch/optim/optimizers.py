"""`poptorch.optim`'s optimisers: torch's with loss scaling, types for their state, and constant or variable numbers.

An argument that is None was not given: the attribute has its default value and is a constant of the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from poptorch._logging import logger
from poptorch.optim import rules
from poptorch.optim.optimizer import Optimizer

Parameters = Iterable[Any]
MAX_WEIGHT_NORM = 65500.0  # the largest round float16, so practically no limit


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _accumulators(**types: torch.dtype | None) -> dict[str, torch.dtype]:
    """The types of accumulator and state, float32 where none was given."""
    return {name: _or(dtype, torch.float32) for name, dtype in types.items()}


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent with momentum, in PopTorch's two variants.

    The separate variant (the default) keeps a velocity tensor of `velocity_accum_type` and accumulates gradients in
    `accum_type`. The combined variant uses one tensor for both, scaled by `velocity_scaling`.

    >>> import poptorch, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, loss_scaling=128.0)
    >>> optimizer.loss_scaling, optimizer.use_combined_accum
    (128.0, False)
    """

    OWN = ("loss_scaling", "use_combined_accum", "accum_type", "velocity_accum_type", "max_grad_norm")

    def __init__(
        self,
        params: Parameters,
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        given = _given(
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
            maximize=maximize, foreach=foreach, differentiable=differentiable,
        )  # fmt: skip
        torch.optim.SGD.__init__(self, params, **given)
        if use_combined_accum:
            self.defaults["velocity_scaling"] = _or(velocity_scaling, 1.0)
            for group in self.param_groups:
                group.setdefault("velocity_scaling", self.defaults["velocity_scaling"])
            given |= _given(velocity_scaling=velocity_scaling)
        elif velocity_scaling is not None:
            logger.warning("velocity_scaling=%s is ignored: it belongs to use_combined_accum=True.", velocity_scaling)
        self._set_up(
            given | _given(loss_scaling=loss_scaling),
            loss_scaling=_or(loss_scaling, 1.0),
            use_combined_accum=bool(use_combined_accum),
            **_accumulators(accum_type=accum_type, velocity_accum_type=velocity_accum_type),
            max_grad_norm=_or(max_grad_norm, float("inf")),
        )


class Adam(Optimizer, torch.optim.Adam):
    """Adam, with an L2 penalty as weight decay.

    >>> import poptorch, torch
    >>> optimizer = poptorch.optim.Adam(torch.nn.Linear(2, 1).parameters(), lr=1e-3, accum_type=torch.float16)
    >>> optimizer.accum_type
    torch.float16
    """

    OWN = (
        "loss_scaling",
        "accum_type",
        "first_order_momentum_accum_type",
        "second_order_momentum_accum_type",
        "max_grad_norm",
    )

    def __init__(
        self,
        params: Parameters,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        given = _given(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, foreach=foreach,
            maximize=maximize, capturable=capturable, differentiable=differentiable, fused=fused,
        )  # fmt: skip
        torch.optim.Adam.__init__(self, params, **given)
        self._set_up(
            given | _given(loss_scaling=loss_scaling),
            loss_scaling=_or(loss_scaling, 1.0),
            **_accumulators(
                accum_type=accum_type,
                first_order_momentum_accum_type=first_order_momentum_accum_type,
                second_order_momentum_accum_type=second_order_momentum_accum_type,
            ),
            max_grad_norm=_or(max_grad_norm, float("inf")),
        )


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay.

    `bias_correction=False` is accepted for the sake of old programs and has no effect on the compiled update.

    >>> import poptorch, torch
    >>> poptorch.optim.AdamW(torch.nn.Linear(2, 1).parameters()).param_groups[0]["weight_decay"]
    0.01
    """

    OWN = (*Adam.OWN, "bias_correction")

    def __init__(
        self,
        params: Parameters,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        given = _given(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, foreach=foreach,
            maximize=maximize, capturable=capturable, differentiable=differentiable, fused=fused,
        )  # fmt: skip
        torch.optim.AdamW.__init__(self, params, **given)
        self._set_up(
            given | _given(loss_scaling=loss_scaling),
            loss_scaling=_or(loss_scaling, 1.0),
            bias_correction=_or(bias_correction, True),
            **_accumulators(
                accum_type=accum_type,
                first_order_momentum_accum_type=first_order_momentum_accum_type,
                second_order_momentum_accum_type=second_order_momentum_accum_type,
            ),
            max_grad_norm=_or(max_grad_norm, float("inf")),
        )


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop as torch defines it, or with `use_tf_variant` as TensorFlow does.

    >>> import poptorch, torch
    >>> poptorch.optim.RMSprop(torch.nn.Linear(2, 1).parameters(), lr=0.01).use_tf_variant
    False
    """

    OWN = (
        "loss_scaling",
        "accum_type",
        "first_order_momentum_accum_type",
        "second_order_momentum_accum_type",
        "use_tf_variant",
    )

    def __init__(
        self,
        params: Parameters,
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
        *,
        capturable: bool | None = None,
    ) -> None:
        given = _given(
            lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered,
            foreach=foreach, maximize=maximize, differentiable=differentiable, capturable=capturable,
        )  # fmt: skip
        torch.optim.RMSprop.__init__(self, params, **given)
        self._set_up(
            given | _given(loss_scaling=loss_scaling),
            loss_scaling=_or(loss_scaling, 1.0),
            **_accumulators(
                accum_type=accum_type,
                first_order_momentum_accum_type=first_order_momentum_accum_type,
                second_order_momentum_accum_type=second_order_momentum_accum_type,
            ),
            use_tf_variant=bool(use_tf_variant),
        )


class LAMB(Optimizer, torch.optim.Optimizer):
    """Layer-wise adaptive moments: AdamW with a step that is proportional to the norm of each parameter.

    `max_weight_norm` limits the norm that counts; without it there is practically no limit.

    >>> import poptorch, torch
    >>> poptorch.optim.LAMB(torch.nn.Linear(2, 1).parameters()).max_weight_norm
    65500.0
    """

    bias_correction: bool
    OWN = (
        "loss_scaling",
        "bias_correction",
        "max_weight_norm",
        "accum_type",
        "first_order_momentum_accum_type",
        "second_order_momentum_accum_type",
    )

    def __init__(
        self,
        params: Parameters,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        given = _given(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        torch.optim.AdamW([torch.empty(0)], **given)  # raises torch's errors: the same numbers with the same limits
        given |= _given(max_weight_norm=max_weight_norm)
        defaults = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "max_weight_norm": MAX_WEIGHT_NORM,
        }
        torch.optim.Optimizer.__init__(self, params, {**defaults, **given})
        self._set_up(
            given | _given(loss_scaling=loss_scaling),
            loss_scaling=_or(loss_scaling, 1.0),
            bias_correction=_or(bias_correction, True),
            max_weight_norm=_or(max_weight_norm, MAX_WEIGHT_NORM),
            **_accumulators(
                accum_type=accum_type,
                first_order_momentum_accum_type=first_order_momentum_accum_type,
                second_order_momentum_accum_type=second_order_momentum_accum_type,
            ),
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update on the host from the gradients in `.grad`, for training without a compiled model."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rule = rules.LAMB(bias_correction=self.bias_correction)
        for group in self.param_groups:
            numbers = {**group, "beta1": group["betas"][0], "beta2": group["betas"][1]}
            hypers = {name: torch.tensor(numbers[name], dtype=torch.float64) for name in rule.hypers}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(rule, parameter, hypers)
        return loss

    def _step_parameter(self, rule: rules.LAMB, parameter: torch.Tensor, hypers: rules.Hypers) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=torch.tensor(0.0), **rule.initial_state(parameter, {}))
        state["step"] += 1
        own = {name: rule.wide(state[name]) for name in rule.state}
        p, grad = rule.wide(parameter), rule.wide(parameter.grad.resolve_conj())  # pyright: ignore
        (new,), (new_state,) = rule.apply([p], [grad], [own], state["step"].reshape(1), hypers)
        parameter.copy_(new)
        for name, value in new_state.items():
            state[name].copy_(value)
