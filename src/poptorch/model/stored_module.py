"""Modules as plain data and tensors, and back: names, nesting, flags, parameters and buffers, but no Python code.

What comes back has the state dictionary of the original. Its `forward` cannot be run, only the compiled program can.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from poptorch.errors import Error, explain
from poptorch.structure import unknown_types, value_data, value_from

Data = Any  # what JSON can hold


class StoredModule(nn.Module):
    """A module that was read from a file; `kind` is the name of the class that it had."""

    kind = "StoredModule"

    def _get_name(self) -> str:
        return self.kind


def module_data(module: nn.Module, forward: inspect.Signature) -> tuple[Data, dict[str, torch.Tensor]]:
    """A module as data and its tensors by name; tensors and modules that it has twice stay one."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    modules: dict[int, str] = {}
    found: list[Data] = []

    def keep(name: str, tensor: torch.Tensor | None) -> str | None:
        if tensor is None:
            return None
        first = names.setdefault(id(tensor), name)
        tensors.setdefault(first, tensor)
        return first

    for path, each in module.named_modules(remove_duplicate=False):
        first = modules.setdefault(id(each), path)
        if first != path:
            found.append({"path": path, "same_as": first})
            continue
        prefix = f"{path}." if path else ""
        transient = getattr(each, "_non_persistent_buffers_set", set[str]())
        found.append(
            {
                "path": path,
                "kind": type(each).__name__,
                "training": each.training,
                "parameters": [
                    [name, keep(prefix + name, p), p is not None and p.requires_grad]
                    for name, p in each._parameters.items()
                ],
                "buffers": [[name, keep(prefix + name, b), name not in transient] for name, b in each._buffers.items()],
            }
        )
    return {"modules": found, "forward": _signature_data(forward)}, tensors


def _signature_data(forward: inspect.Signature) -> Data:
    found: list[Data] = []
    for parameter in forward.parameters.values():
        has_default = parameter.default is not parameter.empty
        default = value_data(parameter.default) if has_default else None
        is_known = has_default and not any(unknown_types([{"value": default}]))
        found.append([parameter.name, parameter.kind.name, [default] if is_known else None])
    return found


def module_from(data: Data, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """The module that data describe, with these tensors; raises `ValueError` and its like for nonsense."""
    made: dict[str, nn.Module] = {}
    kept: dict[str, nn.Parameter] = {}
    for item in data["modules"]:
        path = str(item["path"])
        made[path] = made[item["same_as"]] if "same_as" in item else _module(item, tensors, kept)
        if path:
            parent, _, name = path.rpartition(".")
            made[parent].add_module(name, made[path])
    root = made[""]
    root.forward = _forward(data["forward"], root)
    return root


def _module(data: Data, tensors: Mapping[str, torch.Tensor], kept: dict[str, nn.Parameter]) -> StoredModule:
    module = StoredModule()
    module.kind = str(data["kind"])
    module.training = bool(data["training"])
    for name, place, requires_grad in data["parameters"]:
        if place is not None and place not in kept:
            kept[place] = nn.Parameter(tensors[place], bool(requires_grad))
        module.register_parameter(str(name), None if place is None else kept[place])
    for name, place, persistent in data["buffers"]:
        module.register_buffer(str(name), None if place is None else tensors[place], bool(persistent))
    return module


def _forward(data: Data, module: nn.Module) -> Callable[..., Any]:
    """What stands in for `forward`: it takes the same arguments."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise Error(
            explain(
                f"this {module._get_name()} was loaded from a file: there is a compiled program, but no Python code.",
                fix="call what poptorch.load returned, with arguments like those that it was compiled for; to run or "
                "compile it otherwise, make the model from its class and load this state_dict() into it",
            )
        )

    parameters = [
        inspect.Parameter(
            str(name),
            inspect._ParameterKind[kind],
            default=inspect.Parameter.empty if default is None else value_from(default[0]),
        )
        for name, kind, default in data
    ]
    forward.__signature__ = inspect.Signature(parameters)  # pyright: ignore
    return forward
