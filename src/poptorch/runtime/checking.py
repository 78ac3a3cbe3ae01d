"""Check integers before a call runs: those of its arguments, and those that depend on state alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

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
        self, tensors: Sequence[torch.Tensor], micro_batches: Callable[[], Sequence[Sequence[torch.Tensor]]]
    ) -> None:
        """Check the integers of a call: an argument once, what is computed from arguments for each micro-batch."""
        if self._versions != list(map(_version, self._watched)):
            self.bind(self._state)
        for check in self._of_call:
            if check.position is not None:
                check.check(tensors[check.position])
            else:
                for micro_batch in micro_batches():
                    self._check(check, micro_batch)

    def _check(self, check: IndexCheck, arguments: Sequence[torch.Tensor]) -> None:
        state = [self._state[name] for name in check.state]
        check.check(self._compute[id(check)](*arguments, *state)[0])


def _version(tensor: torch.Tensor) -> int:
    """What changes when a tensor is written to, as far as PyTorch counts that."""
    return 0 if tensor.is_inference() else tensor._version
