"""One process of a run and its siblings: which it is, and how values get from one to the others."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed

import popdist
import popdist.poptorch
import poptorch
from poptorch.lightning.packages import Lightning

_OPERATIONS: dict[str, Any] = {
    "avg": distributed.ReduceOp.SUM,
    "mean": distributed.ReduceOp.SUM,
    "sum": distributed.ReduceOp.SUM,
    "min": distributed.ReduceOp.MIN,
    "max": distributed.ReduceOp.MAX,
}


class Processes:
    """Which of how many processes this one is, as its options say, which know the variables of launchers."""

    def __init__(self, package: Lightning, options: poptorch.Options | None) -> None:
        if options is None:
            options = popdist.poptorch.Options() if popdist.isPopdistEnvSet() else poptorch.Options()
        self._package = package
        self.count: int = options.Distributed.numProcesses
        self.index: int = options.Distributed.processId
        self._has_made_group = False

    @property
    def local_index(self) -> int:
        """Which of the processes on this machine this one is."""
        if popdist.isPopdistEnvSet():
            return popdist.getLocalInstanceIndex()
        return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", self.index))

    def connect(self) -> None:
        """Join a group with the others, if the environment says where they meet."""
        if self.count > 1 and not distributed.is_initialized() and "MASTER_ADDR" in os.environ:
            os.environ.setdefault("MASTER_PORT", "29500")
            distributed.init_process_group("gloo", rank=self.index, world_size=self.count)
            self._has_made_group = True

    def disconnect(self) -> None:
        """Leave the group again."""
        if self._has_made_group and distributed.is_initialized():
            distributed.destroy_process_group()
        self._has_made_group = False

    def _check(self, what: str) -> None:
        if not distributed.is_initialized():
            raise self._package.MisconfigurationException(
                f"{what} of {self.count} processes needs a connection between them: call "
                "torch.distributed.init_process_group, or set MASTER_ADDR and MASTER_PORT so that it happens by itself."
            )

    def reduce(self, value: Any, operation: Any, group: Any) -> Any:
        """A tensor combined with those of the other processes."""
        if self.count == 1 or not isinstance(value, torch.Tensor):
            return value
        self._check("combining values")
        name = operation.lower() if isinstance(operation, str) else ""
        total = value.detach().clone()
        distributed.all_reduce(total, _OPERATIONS.get(name, operation), group)
        return total / self.count if name in ("avg", "mean") else total

    def broadcast(self, value: Any, source: int) -> Any:
        """The value that one process has."""
        if self.count == 1:
            return value
        self._check("sending a value to all")
        box = [value]
        distributed.broadcast_object_list(box, source)
        return box[0]

    def gather(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        """The tensors of all processes, with one more dimension in front."""
        if self.count == 1:
            return tensor
        self._check("gathering the values")
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        distributed.all_gather(parts, tensor.contiguous(), group)
        return torch.stack(parts)

    def wait(self) -> None:
        """Wait for the others, if there is a connection."""
        if self.count > 1 and distributed.is_initialized():
            distributed.barrier()
