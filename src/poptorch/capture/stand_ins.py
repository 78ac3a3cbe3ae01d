"""Put traced tensors into a module in place of its parameters and buffers, and take them out again.

Afterwards every attribute of every submodule is what it was before, whatever `forward` stored on `self`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from poptorch.capture.adaptive import adaptive_loss, has_adaptive_loss
from poptorch.capture.functions import CumulativeMomentum
from poptorch.errors import CompileError, explain
from poptorch.interrupts import run_and_undo

T = TypeVar("T")
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)
_LIBRARIES = frozenset(
    {"builtins", "types", "functools", "weakref", "threading", "logging", "torch", "numpy", "poptorch"}
)
_MOST_CONTAINERS, _MOST_ITEMS = 10_000, 100_000
_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Place:
    """One name under which a tensor is registered."""

    owner: nn.Module
    attribute: str
    name: str

    @property
    def table(self) -> dict[str, Any]:
        parameters = self.owner.__dict__["_parameters"]
        return parameters if self.attribute in parameters else self.owner.__dict__["_buffers"]


def named_state(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Parameters and buffers by their first name; a tied tensor appears once. Raises if one is not dense."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    for name, tensor in (*parameters.items(), *buffers.items()):
        if tensor.layout is not torch.strided:
            kind = "parameter" if name in parameters else "buffer"
            raise CompileError(
                explain(
                    f"{kind} {name} is a {tensor.layout} tensor, but a compiled program works on dense ones.",
                    fix=f"register {name}.to_dense() instead",
                )
            )
    return parameters, buffers


def places(module: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    """Every registration of every parameter and buffer, tied ones included."""
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for attribute, tensor in table.items():
                if tensor is not None:
                    yield Place(owner, attribute, f"{prefix}.{attribute}" if prefix else attribute), tensor


def run_with_stand_ins(module: nn.Module, replacements: Mapping[int, torch.Tensor], body: Callable[[], T]) -> T:
    """Run a function while each parameter and buffer `t` of a module is replaced by `replacements[id(t)]`."""
    submodules = list(module.modules())
    attributes = [(owner, dict(owner.__dict__)) for owner in submodules]
    containers = [(box, copy.copy(box)) for box in _reachable(submodules)]
    tables = [(getattr(owner, table), dict(getattr(owner, table).items())) for owner in submodules for table in _TABLES]
    scripted = {owner for owner in submodules if isinstance(owner, torch.jit.ScriptModule)}
    originals = list(places(module))

    def run() -> T:
        _put_all([(place, replacements[id(tensor)]) for place, tensor in originals])
        for owner in submodules:
            if isinstance(owner, nn.RNNBase) and owner not in scripted:
                owner.__dict__.setdefault("check_input", partial(_check_shape, owner))
            if isinstance(owner, nn.modules.batchnorm._BatchNorm) and owner.momentum is None:
                owner.__dict__["momentum"] = CumulativeMomentum.of(owner)
            if has_adaptive_loss(owner) and "forward" not in owner.__dict__:
                owner.__dict__["forward"] = partial(adaptive_loss, owner)
        return body()

    def undo() -> None:
        for place, tensor in originals:
            if place.owner in scripted:
                _put(place, tensor, scripted=True)
        for owner, saved in attributes:
            if owner not in scripted:
                owner.__dict__.clear()
                owner.__dict__.update(saved)
        for table, saved in tables:
            if isinstance(table, dict):
                _restore(table, saved)
        for box, saved in containers:
            _restore(box, saved)

    return run_and_undo(run, undo)


@contextmanager
def with_own_state(originals: Sequence[tuple[Place, torch.Tensor]]) -> Iterator[None]:
    """Inside, a module that has stand-ins has its own tensors again, for functions that run on the host."""
    plain = [pair for pair in originals if not isinstance(pair[0].owner, torch.jit.ScriptModule)]
    present = [(place, tensor) for place, tensor in plain if place.attribute in place.table]
    stand_ins = [(place, place.table[place.attribute]) for place, _ in present]
    try:
        _put_all(present)
        yield
    finally:
        _put_all(stand_ins)


def _put_all(tensors: Sequence[tuple[Place, torch.Tensor]]) -> None:
    for place, tensor in tensors:
        _put(place, tensor, isinstance(place.owner, torch.jit.ScriptModule))
    for owner in {place.owner for place, _ in tensors}:  # recurrent layers keep a second list of their weights
        if isinstance(owner, nn.RNNBase) and not isinstance(owner, torch.jit.ScriptModule):
            owner.__dict__["_flat_weights"] = [getattr(owner, name, None) for name in owner._flat_weights_names]


def _check_shape(layer: nn.RNNBase, input: torch.Tensor, batch_sizes: torch.Tensor | None) -> None:
    """What a recurrent layer checks about its input except for its type, to which the weights will be cast."""
    weight = layer._flat_weights[0]
    type(layer).check_input(layer, input if weight is None else input.to(weight.dtype), batch_sizes)


def _reachable(submodules: Sequence[nn.Module]) -> list[Any]:
    """The containers that modules hold, and the attributes of their plain objects, as deep as they lie."""
    found: dict[int, Any] = {}
    waiting = [value for owner in submodules for name, value in owner.__dict__.items() if name not in _TABLES]
    while waiting and len(found) < _MOST_CONTAINERS:
        value = waiting.pop()
        box = value if type(value) in _CONTAINERS else _attributes(value)
        if box is not None and id(box) not in found and len(box) < _MOST_ITEMS:
            found[id(box)] = box
            waiting += box.values() if isinstance(box, dict) else box
        elif type(value) is tuple and len(value) < _MOST_ITEMS:
            waiting += value
    return list(found.values())


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of a class that users write; modules are known already."""
    kind = type(value)
    if isinstance(value, (nn.Module, torch.Tensor, type)) or kind.__module__.partition(".")[0] in _LIBRARIES:
        return None
    found = getattr(value, "__dict__", None)
    return found if type(found) is dict else None


def _restore(box: Any, saved: Any) -> None:
    """Give a list, dictionary or set the contents that it had."""
    box.clear()
    if isinstance(box, (list, deque)):
        box.extend(saved)
    else:
        box.update(saved)


def _put(place: Place, tensor: torch.Tensor, scripted: bool) -> None:
    if scripted:
        setattr(place.owner, place.attribute, tensor)
    elif place.attribute in place.owner._parameters:
        place.owner._parameters[place.attribute] = tensor  # pyright: ignore[reportArgumentType]
    else:
        place.owner._buffers[place.attribute] = tensor


def read_back(
    module: nn.Module, expected: Mapping[str, torch.Tensor], buffers: frozenset[str]
) -> dict[str, torch.Tensor]:
    """The tensors that are registered under the given names now; buffers may have been re-assigned, parameters not."""
    now: dict[str, torch.Tensor] = {}
    for name, stand_in in expected.items():
        prefix, _, attribute = name.rpartition(".")
        owner = module.get_submodule(prefix) if prefix else module
        kind = "Buffer" if name in buffers else "Parameter"
        table = owner._buffers if name in buffers else owner._parameters
        current = getattr(owner, attribute) if attribute in table else None
        if current is None:
            raise CompileError(
                explain(
                    f"{kind} {name} is removed from the model during forward.",
                    fix="keep it registered, and change its contents in place instead",
                )
            )
        if current is not stand_in and name not in buffers:
            raise CompileError(
                explain(
                    f"Parameter {name} is reassigned within the model.",
                    fix="change it in place under torch.no_grad(), for example with copy_",
                )
            )
        if current.shape != stand_in.shape:
            raise CompileError(
                explain(
                    f"Buffer {name} is reassigned within the model with shape {list(current.shape)}, "
                    f"but it is registered with shape {list(stand_in.shape)}.",
                    fix="keep its shape, and use copy_ to change its contents",
                )
            )
        now[name] = current
    return now
