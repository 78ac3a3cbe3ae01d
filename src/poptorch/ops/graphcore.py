"""The custom ops of the domain `ai.graphcore` that public packages use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from poptorch.errors import AttributeValueError, nearest
from poptorch.ops.attributes import Attributes
from poptorch.ops.collectives import COLLECTIVES
from poptorch.ops.custom import CustomOp, OpName, Tensors, always, register
from poptorch.ops.small_floats import SmallFloat

_WAYS = ("quantise", "ste", "stop")
_ROUNDINGS = ("nearest", "stochastic")
_LARGEST_EXPONENT, _LARGEST_MANTISSA = 8, 23  # of float32


def _first(inputs: Tensors, attributes: Attributes) -> torch.Tensor:
    return inputs[0].clone()


def _to_second(gradients: Tensors, inputs: Tensors, outputs: Tensors, attributes: Attributes) -> list[Any]:
    return [None, gradients[0]]


def _distances(p: float) -> Callable[[Tensors, Attributes], torch.Tensor]:
    """From each row of the first input to each row of the second."""

    def compute(inputs: Tensors, attributes: Attributes) -> torch.Tensor:
        first, second = inputs
        wide = torch.float32 if first.dtype is torch.float16 else first.dtype  # cdist takes no float16 on CPUs
        exact = "donot_use_mm_for_euclid_dist"
        return torch.cdist(first.to(wide), second.to(wide), p=p, compute_mode=exact).to(first.dtype)

    return compute


def _simulate(inputs: Tensors, attributes: Attributes) -> torch.Tensor:
    return _pass_on(inputs[0], attributes, "fwd", "quantise")


def _simulate_backward(gradients: Tensors, inputs: Tensors, outputs: Tensors, attributes: Attributes) -> torch.Tensor:
    return _pass_on(gradients[0], attributes, "bwd", "ste")


def _pass_on(tensor: torch.Tensor, attributes: Attributes, direction: str, default: str) -> torch.Tensor:
    """A tensor in one direction: rounded ("quantise"), as it is ("ste") or zero ("stop")."""
    way = _chosen(attributes, direction, default, _WAYS)
    rounding = _chosen(attributes, "rounding", "nearest", _ROUNDINGS)
    small = SmallFloat(
        _bits(attributes, "exponent_bits", 2, _LARGEST_EXPONENT),
        _bits(attributes, "mantissa_bits", 0, _LARGEST_MANTISSA),
    )
    if way == "quantise":
        return small.round(tensor, stochastic=rounding == "stochastic")
    return torch.zeros_like(tensor) if way == "stop" else tensor.clone()


def _chosen(attributes: Attributes, name: str, default: str, known: tuple[str, ...]) -> str:
    value = attributes.get(name, default)
    if value not in known:
        raise AttributeValueError(f"attribute {name!r} of SimulatedQuant is {value!r}{nearest(str(value), known)}")
    return str(value)


def _bits(attributes: Attributes, name: str, least: int, most: int) -> int:
    value = attributes.get(name)
    if not isinstance(value, int) or not least <= value <= most:
        raise AttributeValueError(
            f"attribute {name!r} of SimulatedQuant is {value!r}: give an int from {least} to {most}."
        )
    return value


def register_graphcore_ops() -> None:
    """Make the ops known."""
    known = {
        "AutogradProxy": CustomOp(_first, _to_second, is_traced=always),
        "L1Distance": CustomOp(_distances(1.0), is_traced=always),
        "L2Distance": CustomOp(_distances(2.0), is_traced=always),
        "SimulatedQuant": CustomOp(_simulate, _simulate_backward, is_traced=always),
    }
    known.update({name: CustomOp(*functions, is_traced=always) for name, functions in COLLECTIVES.items()})
    for name, op in known.items():
        register(OpName("ai.graphcore", name, 1), op)
