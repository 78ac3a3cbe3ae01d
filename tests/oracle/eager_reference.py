"""What a call of a poptorch model computes, in plain PyTorch: an implementation that shares no code with ours.

A call takes D x G x R micro-batches; number `(d * G + g) * R + r` goes to replica r. Training sums the gradients of the
G x R micro-batches of a device iteration, divides by their number, and steps the optimiser once. Replicas share the
parameters; each has buffers and random numbers of its own, and replica 0's buffers are the module's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

DEVICE_TYPES = {torch.int64: torch.int32, torch.float64: torch.float32}


class EagerReference:
    """A module that is trained (with an optimiser) or run (without) call by call."""

    def __init__(
        self,
        module: nn.Module,
        *,
        device_iterations: int = 1,
        gradient_accumulation: int = 1,
        replicas: int = 1,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        seed: int = 0,
        mode: str | None = None,
        period: int = 1,
    ) -> None:
        self.module, self.optimizer, self.loss = module, optimizer, loss
        self.d, self.g, self.r = device_iterations, gradient_accumulation, replicas
        self.mode = mode or ("All" if optimizer is None else "Final")
        self.period = period
        self._random = [torch.Generator().manual_seed(seed + r).get_state() for r in range(replicas)]
        self._buffers = [_copy_buffers(module) for _ in range(replicas - 1)]
        attributes = [value for owner in module.modules() for value in vars(owner).values()]
        self._host_constants = [value for value in attributes if isinstance(value, torch.Tensor)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():  # what plain PyTorch warns about is not our business
            warnings.simplefilter("ignore")
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        micro_batches = split((args, kwargs), self.d * self.g * self.r)
        returned: list[list[Any]] = []  # by device iteration and accumulation step, then by replica
        for _ in range(self.d):
            total: dict[str, torch.Tensor] = {}
            for _ in range(self.g):
                returned.append([self._micro_batch(next(micro_batches), r, total) for r in range(self.r)])
            self._update(total)
        return self._collect(returned)

    def _micro_batch(self, arguments: Any, replica: int, total: dict[str, torch.Tensor]) -> Any:
        args, kwargs = arguments
        with self._on_replica(replica):
            if self.optimizer is None:
                with torch.no_grad():
                    return self._as_result(self.module(*args, **kwargs))
            self.module.zero_grad()
            assert self.loss is not None
            result = self.module(*args, **kwargs)
            self.loss(result).sum().backward()
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None:
                    total[name] = total[name] + parameter.grad if name in total else parameter.grad.clone()
            return self._as_result(result)

    def _update(self, total: dict[str, torch.Tensor]) -> None:
        if self.optimizer is None:
            return
        for name, parameter in self.module.named_parameters():
            parameter.grad = total[name] / (self.g * self.r) if name in total else None
        self.optimizer.step()
        self.module.zero_grad()

    @contextmanager
    def _on_replica(self, replica: int) -> Iterator[None]:
        """The random stream and the buffers of a replica are in place."""
        host = torch.get_rng_state()
        torch.set_rng_state(self._random[replica])
        try:
            with _other_buffers(self.module, self._buffers[replica - 1]) if replica else nullcontext():
                yield
        finally:
            _detach_buffers(self.module)
            self._random[replica] = torch.get_rng_state()
            torch.set_rng_state(host)

    def _as_result(self, result: Any) -> Any:
        """Copies that later micro-batches cannot change; a tensor from outside the model is kept as it is."""

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            narrowed = tensor.detach().to(DEVICE_TYPES.get(tensor.dtype, tensor.dtype)).clone()
            narrowed.is_constant = any(tensor is constant for constant in self._host_constants)  # type: ignore[attr-defined]
            return narrowed

        return map_tensors(copy, result)

    def _collect(self, returned: list[list[Any]]) -> Any:
        if self.mode == "Final":
            chosen = returned[-1]
        elif self.mode == "All":
            chosen = [result for results in returned for result in results]
        elif self.mode == "EveryN":
            kept = [i for i in range(len(returned)) if (i // self.g + 1) % self.period == 0]
            chosen = [result for i in kept for result in returned[i]]
        else:
            columns = zip(*returned, strict=True)
            chosen = [map_tensors(_total, *column) for column in columns]
        return chosen[0] if len(chosen) == 1 else map_tensors(_join, *chosen)


def split(arguments: Any, count: int) -> Iterator[Any]:
    """The arguments of each micro-batch; tensors are cut along dimension 0, without copying them."""
    for index in range(count):
        yield map_tensors(lambda t, i=index: t.chunk(count)[i] if count > 1 else t, arguments)


def map_tensors(function: Callable[..., Any], *values: Any) -> Any:
    """Apply a function to the tensors at each place of nested values of the same shape."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return function(*values)
    if isinstance(first, dict):
        return type(first)({key: map_tensors(function, *(value[key] for value in values)) for key in first})
    if isinstance(first, (list, tuple)):
        items = [map_tensors(function, *column) for column in zip(*values, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first


def _join(*tensors: torch.Tensor) -> torch.Tensor:
    if tensors[0].is_constant:  # type: ignore[attr-defined]
        return tensors[0]
    return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors)


def _total(*tensors: torch.Tensor) -> torch.Tensor:
    if tensors[0].is_constant:  # type: ignore[attr-defined]
        return tensors[0]
    total = torch.stack(tensors).sum(0, dtype=tensors[0].dtype)
    total.is_constant = False  # type: ignore[attr-defined]
    return total


def _copy_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def _detach_buffers(module: nn.Module) -> None:
    """Cut buffers off from the history of their last values."""
    for owner in module.modules():
        for attribute, buffer in owner._buffers.items():
            if buffer is not None and buffer.requires_grad:
                owner._buffers[attribute] = buffer.detach()


@contextmanager
def _other_buffers(module: nn.Module, values: dict[str, torch.Tensor]) -> Iterator[None]:
    """The registered buffers have these values, which follow them; afterwards they are what they were.

    The objects stay the same, because a module may hold them in other places as well.
    """
    registered = dict(module.named_buffers())
    before = _copy_buffers(module)
    with torch.no_grad():
        for name, buffer in registered.items():
            buffer.copy_(values[name])
    try:
        yield
    finally:
        values.update(_copy_buffers(module))
        for name, buffer in registered.items():
            prefix, _, attribute = name.rpartition(".")
            module.get_submodule(prefix)._buffers[attribute] = buffer
            with torch.no_grad():
                buffer.copy_(before[name])


def assert_same(actual: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 1e-6, where: str = "result") -> None:
    """Nested values have the same types, the same shapes and dtypes of tensors, and close numbers."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{where} is {actual!r} instead of a tensor"
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=False, msg=lambda m: f"{where}: {m}"
        )
        return
    assert type(actual) is type(expected), f"{where} is a {type(actual).__name__}, not a {type(expected).__name__}"
    if isinstance(expected, dict):
        assert list(actual) == list(expected), f"{where} has the keys {list(actual)}, not {list(expected)}"
        for key in expected:
            assert_same(actual[key], expected[key], rtol=rtol, atol=atol, where=f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{where} has {len(actual)} items, not {len(expected)}"
        for index, (item, wanted) in enumerate(zip(actual, expected, strict=True)):
            assert_same(item, wanted, rtol=rtol, atol=atol, where=f"{where}[{index}]")
    else:
        assert actual == expected, f"{where} is {actual!r}, not {expected!r}"
