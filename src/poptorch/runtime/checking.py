"""Checks before a call runs: of the integers among its arguments, of those that depend on state alone, and of memory
that arguments share although `forward` changes one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from poptorch.errors import ArgumentError, explain
from poptorch.executable import Executable, IndexCheck
from poptorch.ir.python import as_function

State = Mapping[str, torch.Tensor]


class CallChecks:
    """The index checks of an executable, ready to be made."""

    def __init__(self, executable: Executable) -> None:
        self._of_state = [check for check in executable.checks if check.is_of_state]
        self._of_call = [check for check in executable.checks if not check.is_of_state]
        self._compute = {
            id(check): as_function(check.ops.ops, "index check", check.ops.graphs)
            for check in executable.checks
            if check.ops is not None
        }
        names, step = executable.interface.arguments.tensor_names, executable.step
        self._names = names
        self._written = [names.index(name) for name in names if name in step.signature.written]
        self._state: State = {}
        self._watched: list[torch.Tensor] = []
        self._versions: list[int] | None = None  # of what was found to be in order

    def bind(self, state: State) -> None:
        """Check the integers that depend on this state alone; they are the same until somebody changes it."""
        self._state, self._versions = state, None
        self._watched = [state[name] for name in sorted({name for check in self._of_state for name in check.state})]
        for check in self._of_state:
            self._check(check, ())
        self._versions = list(map(_version, self._watched))

    def make(
        self,
        tensors: list[torch.Tensor],
        micro_batches: Callable[[list[torch.Tensor]], Sequence[Sequence[torch.Tensor]]],
    ) -> None:
        """Check the integers of a call: an argument once, what is computed from arguments for each micro-batch."""
        if self._versions != list(map(_version, self._watched)):
            self.bind(self._state)
        for position in self._written:
            self._check_memory(position, tensors)
        for check in self._of_call:
            if check.position is not None:
                check.check(tensors[check.position])
            else:
                for micro_batch in micro_batches(tensors):
                    self._check(check, micro_batch)

    def _check_memory(self, written: int, tensors: Sequence[torch.Tensor]) -> None:
        """The program knows each argument by itself: a change of one would not show in another."""
        for position, tensor in enumerate(tensors):
            if position != written and _overlap(tensor, tensors[written]):
                raise ArgumentError(
                    explain(
                        f"argument {self._names[written]} shares memory with argument {self._names[position]}, "
                        "and forward changes it in place.",
                        state="nothing of this call has run",
                        fix=f"pass {self._names[position]}.clone()",
                    )
                )

    def _check(self, check: IndexCheck, arguments: Sequence[torch.Tensor]) -> None:
        state = [self._state[name] for name in check.state]
        check.check(self._compute[id(check)](*arguments, *state)[0])


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors use the same bytes."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _version(tensor: torch.Tensor) -> int:
    """What changes when a tensor is written to, as far as PyTorch counts that."""
    return 0 if tensor.is_inference() else tensor._version
