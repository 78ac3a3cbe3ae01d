"""Put traced tensors into a module in place of its parameters and buffers, and take them out again.

While the context is open the module computes with the stand-ins. When it closes, every attribute of every submodule is
what it was before, whatever `forward` stored on `self`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poptorch.capture.functions import CumulativeMomentum
from poptorch.errors import CompileError, explain

_CONTAINERS = (list, dict, set, OrderedDict, defaultdict)
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
    """Parameters and buffers by their first name; a tied tensor appears once."""
    return dict(module.named_parameters()), dict(module.named_buffers())


def places(module: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    """Every registration of every parameter and buffer, tied ones included."""
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for attribute, tensor in table.items():
                if tensor is not None:
                    yield Place(owner, attribute, f"{prefix}.{attribute}" if prefix else attribute), tensor


@contextmanager
def stand_ins(module: nn.Module, replacements: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace each parameter and buffer `t` by `replacements[id(t)]` while the context is open."""
    submodules = list(module.modules())
    attributes = [(owner, dict(owner.__dict__)) for owner in submodules]
    containers = [
        (box, copy.copy(box)) for _, saved in attributes for box in saved.values() if type(box) in _CONTAINERS
    ]
    tables = [(getattr(owner, table), dict(getattr(owner, table).items())) for owner in submodules for table in _TABLES]
    scripted = {owner for owner in submodules if isinstance(owner, torch.jit.ScriptModule)}
    originals = list(places(module))
    try:
        for place, tensor in originals:
            _put(place, replacements[id(tensor)], place.owner in scripted)
        for owner in submodules:  # recurrent layers keep a second list of their weights
            if isinstance(owner, nn.RNNBase) and owner not in scripted:
                owner.__dict__["_flat_weights"] = [getattr(owner, name, None) for name in owner._flat_weights_names]
            if isinstance(owner, nn.modules.batchnorm._BatchNorm) and owner.momentum is None:
                owner.__dict__["momentum"] = CumulativeMomentum.of(owner)
        yield
    finally:
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


def _restore(box: Any, saved: Any) -> None:
    """Give a list, dictionary or set the contents that it had."""
    box.clear()
    if isinstance(box, list):
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
