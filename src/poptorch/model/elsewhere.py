"""Parameters, buffers and optimiser state that other processes keep up to date.

They have no values here: parameters and buffers are on the meta device, so that nobody can read old values and they
take no memory. `fetch` brings the values, until the model trains on.
"""

from __future__ import annotations

import torch
from torch import nn

from poptorch.errors import Error, explain
from poptorch.executable import Home, Share
from poptorch.model.clock import exchange
from poptorch.model.program_state import table_of
from poptorch.processes import Team

_HOME = "_poptorch_process"  # an attribute of tensors without values: the process that has them


def home_of(tensor: torch.Tensor) -> int | None:
    """The process that has the values of a tensor, if that is another one."""
    return getattr(tensor, _HOME, None) if tensor.is_meta else None


def release(module: nn.Module, share: Share) -> None:
    """Let go of what other processes keep up to date."""
    for home in share.elsewhere:
        tensor = _tensor(module, home)
        if not tensor.is_meta:
            _put(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), home)
        setattr(tensor, _HOME, home.process)


def fetch(module: nn.Module, share: Share, group: Team) -> None:
    """Bring the values of all parameters and buffers here, as all processes do."""
    for home in share.homes:
        tensor = _tensor(module, home)
        if home.process != share.index and tensor.is_meta:
            _put(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=home.spec.dtype), home)
        with torch.no_grad():
            group.spread([tensor], home.process)


def _tensor(module: nn.Module, home: Home) -> torch.Tensor:
    table, attribute = table_of(module, home.spec)
    return table[attribute]


def _put(tensor: torch.Tensor, contents: torch.Tensor, home: Home) -> None:
    try:
        exchange(tensor, contents)
    except RuntimeError as error:
        raise Error(
            explain(
                f"{home.spec.role.value} {home.spec.name}, which is in process {home.process}, cannot be let go here.",
                reason=str(error).splitlines()[0],
                fix="keep no views, weak references or losses of plain PyTorch that belong to it",
            )
        ) from error
