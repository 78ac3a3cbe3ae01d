"""One call of a function as a model, run by poptorch and by eager PyTorch.

The tensors of the call are arguments of the model, everything else is a constant, also tensors without elements, which
a model refuses as arguments. For training, the tensors that require gradients are parameters, the loss is a weighted
sum of all floats that come out, and the result is that of one step of SGD.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import poptorch

SEED = 42
RATE = 0.1
NARROW = {torch.int64: torch.int32, torch.float64: torch.float32, torch.complex128: torch.complex64}


@dataclass(frozen=True)
class _Constant:
    value: Any


def unchanged(result: Any) -> Any:
    return result


class Called(nn.Module):
    """A call of a function, or of a module; `passed` are the arguments that the model takes."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        training: bool = False,
        process: Callable[[Any], Any] = unchanged,
    ) -> None:
        super().__init__()
        self.function = copy.deepcopy(function) if isinstance(function, nn.Module) else function
        self.process, self.has_loss = process, training
        self.passed: list[torch.Tensor] = []
        values, self.layout = pytree.tree_flatten((args, kwargs or {}))
        self.leaves = [self._leaf(index, value) for index, value in enumerate(values)]

    def _leaf(self, index: int, value: Any) -> _Constant | str | int:
        """A constant, the name of a parameter, or the number of an argument."""
        if not isinstance(value, torch.Tensor):
            return _Constant(value)
        copied = value.detach().clone()
        if self.has_loss and value.requires_grad:
            self.register_parameter(f"p{index}", nn.Parameter(copied))
            return f"p{index}"
        if not value.numel():
            return _Constant(copied)
        self.passed.append(copied)
        return len(self.passed) - 1

    def forward(self, *tensors: torch.Tensor) -> Any:
        values = [
            leaf.value
            if isinstance(leaf, _Constant)
            else getattr(self, leaf)
            if isinstance(leaf, str)
            else tensors[leaf]
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(values, self.layout)
        result = self.function(*args, **kwargs)
        return poptorch.identity_loss(weighted_sum(self.process(result)), "none") if self.has_loss else result


class Together(nn.Module):
    """Several calls as one model, which takes the arguments of all of them and gives all results."""

    def __init__(self, calls: Sequence[Called]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(calls)
        self.passed = [tensor for call in calls for tensor in call.passed]

    def forward(self, *tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        return [call(*islice(rest, len(call.passed))) for call in self.calls]  # pyright: ignore


def weighted_sum(result: Any) -> torch.Tensor:
    """A number that depends on every float of a result, on each in its own way."""
    total = torch.zeros(())
    for tensor in pytree.tree_leaves(result):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            weights = torch.arange(real.numel(), dtype=torch.float32).cos().reshape(real.shape)
            total = total + (real.to(torch.float32) * weights).sum()
    return total


def run_eager(call: Called) -> Any:
    """The result, and the arguments afterwards."""
    torch.manual_seed(SEED)
    with torch.no_grad():
        return call(*call.passed), call.passed


def run(call: Called | Together, engine: str, seed: int = SEED) -> Any:
    """The same through an inference model."""
    options = poptorch.Options().engine(engine).randomSeed(seed)
    return poptorch.inferenceModel(call, options)(*call.passed), call.passed


def train_eager(call: Called) -> Any:
    """The loss, and the parameters after a step; None if there is nothing to differentiate."""
    torch.manual_seed(SEED)
    loss = call(*call.passed)
    if not loss.requires_grad:
        return None
    loss.backward()
    torch.optim.SGD(call.parameters(), lr=RATE).step()
    return loss.detach(), [parameter.detach() for parameter in call.parameters()]


def train(call: Called, engine: str) -> Any:
    """The same through a training model."""
    options = poptorch.Options().engine(engine).randomSeed(SEED)
    training = poptorch.trainingModel(call, options, torch.optim.SGD(call.parameters(), lr=RATE))
    return training(*call.passed), [parameter.detach() for parameter in call.parameters()]


def difference(actual: Any, expected: Any, *, compares_values: bool = True) -> str:
    """What differs between two results, or nothing. 64-bit types count as the 32-bit ones that a device has."""
    ours, our_layout = pytree.tree_flatten(actual)
    theirs, their_layout = pytree.tree_flatten(expected)
    if our_layout != their_layout:
        return f"the result is {our_layout}, not {their_layout}"
    found = (_of_leaves(a, b, compares_values) for a, b in zip(ours, theirs, strict=True))
    return next(filter(None, found), "")


def _of_leaves(actual: Any, expected: Any, compares_values: bool) -> str:
    if not isinstance(expected, torch.Tensor):
        is_same = actual == expected or (actual != actual and expected != expected)
        return "" if is_same else f"{actual!r} instead of {expected!r}"
    if not isinstance(actual, torch.Tensor):
        return f"{actual!r} instead of a tensor"
    actual, expected = (t.to(NARROW.get(t.dtype, t.dtype)) for t in (actual, expected))
    if not compares_values:
        actual, expected = torch.zeros_like(actual), torch.zeros_like(expected)
    try:
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return str(error)
    return ""
