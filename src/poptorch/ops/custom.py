"""Custom ops by name: what `poptorch.custom_op` finds, and how a program calls it when it runs.

An op is found under its domain, name and version: among those that were registered, or in `torch.ops`, where libraries
put theirs when they are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from poptorch._logging import warn_once
from poptorch.errors import EngineError, explain, nearest
from poptorch.ops.attributes import Attributes
from poptorch.ops.host_call import What, answers
from poptorch.ops.private import (
    TorchOp,
    as_torch_op,
    describes_results,
    find_op,
    op_names,
    returns_tensors,
    takes_list,
)

Tensors = list[torch.Tensor]
Forward = Callable[[Tensors, Attributes], Any]
Backward = Callable[[Tensors, Tensors, Tensors, Attributes], Any]  # gradients, inputs, outputs
FORWARD, GRADIENT = "custom op", "gradient of custom op"


@dataclass(frozen=True)
class OpName:
    """What a custom op is called."""

    domain: str
    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.domain}.{self.name} version {self.version}"


def _never(inputs: Tensors, attributes: Attributes) -> bool:
    return False


def always(inputs: Tensors, attributes: Attributes) -> bool:
    return True


@dataclass(frozen=True)
class CustomOp:
    """What an op computes, its derivative if that is not to be found by autograd, and what its results are like.

    If it `is_traced`, the ops that `forward` calls become a part of the program; otherwise the program calls `forward`.
    """

    forward: Forward
    backward: Backward | None = None
    shape: Forward | None = None
    is_traced: Callable[[Tensors, Attributes], bool] = _never

    def outputs(self, inputs: Sequence[torch.Tensor], attributes: Attributes) -> Tensors:
        """What the op computes."""
        result = self.forward(list(inputs), dict(attributes))
        return list(result) if isinstance(result, (list, tuple)) else [result]

    def gradients(
        self,
        gradients: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        attributes: Attributes,
    ) -> list[torch.Tensor | None]:
        """The gradient of each input, from `backward`."""
        assert self.backward is not None
        result = self.backward(list(gradients), list(inputs), list(outputs), dict(attributes))
        found = list(result) if isinstance(result, (list, tuple)) else [result]
        if len(found) != len(inputs):
            raise EngineError(
                explain(
                    f"the backward function of a custom op returned {len(found)} gradients for {len(inputs)} inputs.",
                    fix="return one for each input, in their order; None for an input that has no gradient",
                )
            )
        return found


_REGISTERED: dict[OpName, CustomOp] = {}


def register(name: OpName, op: CustomOp) -> None:
    """Make an op known; an earlier one of the same name is forgotten."""
    _REGISTERED[name] = op


def find(name: OpName) -> CustomOp | None:
    """The op of a name: one that was registered, or else one of `torch.ops`."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    namespace = _namespace(name.domain)
    ops = (find_op(namespace, candidate) for candidate in _torch_names(name))
    return next((from_torch(op) for op in ops if op is not None), None)


def from_torch(op: TorchOp) -> CustomOp:
    """An op of torch as a custom op; if it can describe its results, it becomes a part of programs itself."""
    return CustomOp(partial(_call_torch, op), is_traced=partial(_can_be_traced, op))


def as_custom_op(forward: Any, backward: Backward | None, shape: Forward | None, *, traced: bool) -> CustomOp:
    """What a user registers: a Python function, or an op of torch."""
    op = as_torch_op(forward)
    if op is None:
        return CustomOp(forward, backward, shape, always if traced else _never)
    if backward is None and shape is None:
        return from_torch(op)
    return CustomOp(partial(_call_torch, op), backward, shape)


def _call_torch(op: TorchOp, inputs: Tensors, attributes: Attributes) -> Any:
    return op(inputs, **attributes) if takes_list(op) else op(*inputs, **attributes)


def _can_be_traced(op: TorchOp, inputs: Tensors, attributes: Attributes) -> bool:
    """Whether a program can hold the op: other code than that for tensors without values must not see one."""
    if not describes_results(op) or not returns_tensors(op):
        return False
    try:
        _call_torch(op, [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in inputs], attributes)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _namespace(domain: str) -> str:
    return re.sub(r"\W", "_", domain, flags=re.ASCII)


def _torch_names(name: OpName) -> list[str]:
    """What libraries may call an op: in its own spelling or in lower case; `_v2` after the name is its version."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.name).lower()
    spellings = list(dict.fromkeys([name.name, words]))
    versioned = [f"{spelling}_v{name.version}" for spelling in spellings]
    return [*versioned, *spellings] if name.version == 1 else versioned


def unknown(name: OpName) -> str:
    """The message about an op that cannot be found."""
    namespace = _namespace(name.domain)
    known = [*map(str, _REGISTERED), *(f"torch.ops.{namespace}.{found}" for found in op_names(namespace))]
    return explain(
        f"there is no custom op {name}{nearest(str(name), known)}",
        registered=", ".join(sorted(known)),
        searched=f"torch.ops.{namespace}: {', '.join(_torch_names(name))}",
        fix="register it with poptorch.registerCustomOp, or load the library that defines it, for example with "
        "ctypes.cdll.LoadLibrary",
    )


def call_of(name: OpName, attributes: Attributes) -> What:
    """An op as a program names it."""
    return [str(name), name.domain, name.name, name.version, attributes]


def _called(what: What) -> tuple[CustomOp, Attributes]:
    _, domain, op_name, version, attributes, *_ = what
    name = OpName(domain, op_name, version)
    op = find(name)
    if op is None:
        raise EngineError(unknown(name))
    return op, attributes


@answers(FORWARD)
def _compute(what: What, inputs: Tensors) -> Tensors:
    op, attributes = _called(what)
    with torch.no_grad():
        return op.outputs([x.detach() for x in inputs], attributes)


@answers(GRADIENT)
def _differentiate(what: What, tensors: Tensors) -> Tensors:
    """The gradients of the inputs that are asked for, from those of the outputs, the inputs and the outputs."""
    op, attributes = _called(what)
    count, wanted = what[-2:]
    n_outputs = (len(tensors) - count) // 2
    tensors = [x.detach() for x in tensors]
    gradients, inputs, outputs = tensors[:n_outputs], tensors[n_outputs : n_outputs + count], tensors[-n_outputs:]
    if op.backward is None:
        found = _by_autograd(op, what[0], gradients, inputs, wanted, attributes)
    else:
        with torch.no_grad():
            every = op.gradients(gradients, inputs, outputs, attributes)
        found = [every[index] for index in wanted]
    pairs = zip(found, wanted, strict=True)
    return [torch.zeros_like(inputs[i]) if g is None else g.to(inputs[i].dtype) for g, i in pairs]


def _by_autograd(
    op: CustomOp, name: str, gradients: Tensors, inputs: Tensors, wanted: list[int], attributes: Attributes
) -> list[torch.Tensor | None]:
    """Run the op again, and let PyTorch differentiate what it does."""
    with torch.inference_mode(False), torch.enable_grad():
        given = [x.clone() if x.is_inference() else x for x in inputs]
        for index in wanted:
            given[index].requires_grad_(True)
        outputs = op.outputs(given, attributes)
        reached = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
        if not reached:
            warn_once(f"the custom op {name} has no derivative: nothing that its inputs depend on is trained by it.")
            return [None for _ in wanted]
        values, starts = zip(*reached, strict=True)
        return list(torch.autograd.grad(values, [given[index] for index in wanted], starts, allow_unused=True))
