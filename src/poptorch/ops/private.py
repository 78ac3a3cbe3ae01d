"""The door for names of PyTorch that are not public: which ops it knows, and how they can run."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import (
    _dispatch_get_all_op_names,  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    _dispatch_has_kernel_for_dispatch_key,
)
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

TorchOp = OpOverload[..., Any] | OpOverloadPacket[..., Any]


def op_names(namespace: str) -> list[str]:
    """The ops that are known in a namespace of `torch.ops`, without their overloads."""
    names: list[str] = _dispatch_get_all_op_names()
    found = {name.partition(".")[0] for name in names if name.startswith(f"{namespace}::")}
    return sorted(name.partition("::")[2] for name in found)


def find_op(namespace: str, name: str) -> TorchOp | None:
    """An op by its name, if it is known."""
    found = getattr(getattr(torch.ops, namespace), name, None)
    return found if isinstance(found, OpOverloadPacket) else None


def as_torch_op(function: object) -> TorchOp | None:
    """The op that a function is, if it is one of `torch.ops` or was made by `torch.library.custom_op`."""
    if isinstance(function, CustomOpDef):
        return function._opoverload
    return function if isinstance(function, (OpOverload, OpOverloadPacket)) else None


def overloads(op: TorchOp) -> list[OpOverload[..., Any]]:
    return [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]


def describes_results(op: TorchOp) -> bool:
    """Whether an op has code of its own for tensors without values, which tells what its results are like."""
    return all(_dispatch_has_kernel_for_dispatch_key(each.name(), "Meta") for each in overloads(op))


def returns_tensors(op: TorchOp) -> bool:
    """Whether each result of an op is a tensor, and not a list of them."""
    return all(str(result.type) == "Tensor" for each in overloads(op) for result in each._schema.returns)


def takes_list(op: TorchOp) -> bool:
    """Whether the first argument of an op is a list of tensors."""
    return any(
        str(each._schema.arguments[0].type) == "List[Tensor]" for each in overloads(op) if each._schema.arguments
    )
