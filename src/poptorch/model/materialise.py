"""Give values to parameters and buffers that were built on the meta device, as far as a program works on them.

Modules do so themselves, in `reset_parameters`, one after the other in the order in which they would have been built.
Random numbers are drawn for all of them, so that the values do not depend on which process works on which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from poptorch._logging import logger
from poptorch.errors import CompileError, explain
from poptorch.executable import Executable
from poptorch.ir import Role
from poptorch.model.clock import exchange
from poptorch.model.elsewhere import home_of


def materialise(module: nn.Module, executable: Executable, *, training: bool) -> None:
    """Let a module initialise what a program works on and has no values; for inference it must have them."""
    here = {spec.name for spec in executable.state if spec.role in (Role.PARAMETER, Role.BUFFER)}
    missing = {name: tensor for name, tensor in _state(module) if name in here and tensor.is_meta}
    for name, tensor in missing.items():
        home = home_of(tensor)
        if home is not None or not training:
            raise CompileError(_no_values(name, home))
    if missing:
        _initialise(module, here)
        logger.info("initialised %d parameters and buffers that had no values", len(missing))


def _initialise(module: nn.Module, here: Collection[str]) -> None:
    """Initialise the modules with tensors on the meta device; what nobody works on here has no values afterwards."""
    done: set[int] = set()
    for prefix, owner in _children_first(module, ""):
        own = {f"{prefix}{name}": tensor for name, tensor in _direct(owner)}
        empty = {name: tensor for name, tensor in own.items() if tensor.is_meta and home_of(tensor) is None}
        if not empty:
            continue
        reset = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
        is_mixed = any(not t.is_meta and id(t) not in done for t in own.values())
        if reset is None or is_mixed:
            if wanted := [name for name in empty if name in here]:
                raise CompileError(_cannot_initialise(wanted[0], owner, is_mixed=is_mixed))
            continue
        for tensor in empty.values():
            exchange(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"))
        with torch.no_grad():
            reset()
        for name, tensor in empty.items():
            done.add(id(tensor))
            if name not in here:
                exchange(tensor, tensor.detach().to("meta"))


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _direct(owner: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from owner.named_parameters(recurse=False)
    yield from owner.named_buffers(recurse=False)


def _children_first(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Every submodule with the prefix of its names, as constructors that build their children first are run."""
    for name, child in module.named_children():
        yield from _children_first(child, f"{prefix}{name}.")
    yield prefix, module


def _no_values(name: str, home: int | None) -> str:
    if home is not None:
        return explain(
            f"the values of {name} are in process {home}, and this process needs them.",
            fix="call copyWeightsToHost() on the training model in all processes before another one is made",
        )
    return explain(
        f"{name} has no values: it is on the meta device, and the model is not trained.",
        fix="load weights with load_state_dict(..., assign=True), or train the model first",
    )


def _cannot_initialise(name: str, owner: nn.Module, *, is_mixed: bool) -> str:
    kind = type(owner).__name__
    return explain(
        f"{name} has no values: it is on the meta device, and {kind} cannot give it any.",
        reason="some of its parameters have values already" if is_mixed else f"{kind} has no reset_parameters()",
        fix=f"give {kind} a method reset_parameters() that initialises all of its own parameters and buffers",
    )
