"""Exchanges between replicas inside `forward`: what the custom ops `Replicated…` of the domain `ai.graphcore` do.

A program that exchanges runs for all replicas at once, and the compiler writes an exchange as ops along the dimension
of the replicas. The ops here stand for exchanges until then; they only run by themselves where there is one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from poptorch.errors import CompileError, explain

Tensors = list[torch.Tensor]
Attributes = Mapping[str, Any]
_REPLICAS: ContextVar[int] = ContextVar("poptorch_replicas", default=1)


@contextmanager
def running_on(replicas: int) -> Iterator[None]:
    """Inside, a model is captured for so many replicas."""
    token = _REPLICAS.set(replicas)
    try:
        yield
    finally:
        _REPLICAS.reset(token)


@torch.library.custom_op("poptorch::replicated_gather", mutates_args=())
def _gather(x: torch.Tensor, replicas: int) -> torch.Tensor:
    """The values of all replicas, stacked."""
    assert replicas == 1, "the compiler replaces this op"
    return x.unsqueeze(0).clone()


@torch.library.custom_op("poptorch::replicated_part", mutates_args=())
def _part(x: torch.Tensor, replicas: int) -> torch.Tensor:
    """Of a value with an entry for each replica, that of this replica."""
    assert replicas == 1, "the compiler replaces this op"
    return x[0].clone()


@torch.library.custom_op("poptorch::replicated_sum", mutates_args=())
def _sum(x: torch.Tensor, replicas: int) -> torch.Tensor:
    """The sum of the values of all replicas."""
    assert replicas == 1, "the compiler replaces this op"
    return x.clone()


@torch.library.custom_op("poptorch::replicated_exchange", mutates_args=())
def _exchange(x: torch.Tensor, replicas: int) -> torch.Tensor:
    """A part of the first dimension from every replica: from replica q that part which has the number of this one."""
    assert replicas == 1, "the compiler replaces this op"
    return x.clone()


@_gather.register_fake
def _(x: torch.Tensor, replicas: int) -> torch.Tensor:
    return x.new_empty((replicas, *x.shape))


@_part.register_fake
def _(x: torch.Tensor, replicas: int) -> torch.Tensor:
    return x.new_empty(x.shape[1:])


@_sum.register_fake
def _(x: torch.Tensor, replicas: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@_exchange.register_fake
def _(x: torch.Tensor, replicas: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _all_gather(inputs: Tensors, attributes: Attributes) -> torch.Tensor:
    return _gather(inputs[0], _REPLICAS.get())


def _all_gather_backward(gradients: Tensors, inputs: Tensors, outputs: Tensors, attributes: Attributes) -> Any:
    """All replicas have computed the same with the same values, so their gradients are equal: each takes its part."""
    return [_part(gradients[0], _REPLICAS.get())]


def _all_reduce(inputs: Tensors, attributes: Attributes) -> torch.Tensor:
    """The sum in one direction, and the value as it is in the other."""
    op = attributes.get("op", "sum")
    if op != "sum":
        raise CompileError(explain(f"ReplicatedAllReduceTP has the attribute op={op!r}.", fix='use op="sum"'))
    return inputs[0].clone() if attributes.get("backwards") else _sum(inputs[0], _REPLICAS.get())


def _all_reduce_backward(gradients: Tensors, inputs: Tensors, outputs: Tensors, attributes: Attributes) -> Any:
    return [_sum(gradients[0], _REPLICAS.get()) if attributes.get("backwards") else gradients[0].clone()]


def _all_to_all(inputs: Tensors, attributes: Attributes) -> torch.Tensor:
    x, replicas = inputs[0], _REPLICAS.get()
    if not x.dim() or x.shape[0] % replicas:
        raise CompileError(
            explain(
                f"ReplicatedAllToAll takes a tensor of shape {list(x.shape)}, "
                f"whose first dimension cannot be cut into {replicas} equal parts, one for each replica.",
                fix="give it a first dimension that is a multiple of replicationFactor",
            )
        )
    return _exchange(x, replicas)


def _all_to_all_backward(gradients: Tensors, inputs: Tensors, outputs: Tensors, attributes: Attributes) -> Any:
    return [_exchange(gradients[0].contiguous(), _REPLICAS.get())]


Forward = Callable[[Tensors, Attributes], Any]
Backward = Callable[[Tensors, Tensors, Tensors, Attributes], Any]
COLLECTIVES: dict[str, tuple[Forward, Backward]] = {
    "ReplicatedAllGather": (_all_gather, _all_gather_backward),
    "ReplicatedAllReduceTP": (_all_reduce, _all_reduce_backward),
    "ReplicatedAllToAll": (_all_to_all, _all_to_all_backward),
}  # what each op of `ai.graphcore`, version 1, computes, and its derivative; both are traced
