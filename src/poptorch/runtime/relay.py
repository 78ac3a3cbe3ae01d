"""Hand values from part to part: what the sections of a step have computed for micro-batches that are under way.

Parts of the same micro-batch run in order, but perhaps on different threads; a part waits for what it needs. Values are
dropped when their last reader has them, so what is kept at any moment is what the schedule says. If other processes
have some of the parts, a courier brings what those compute.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from poptorch.executable import Executable, Program
from poptorch.ir import OutputRole, Role
from poptorch.runtime.courier import Courier

_LOOK_SECONDS = 0.2  # between looks whether the call was given up

Runner = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class GivenUp(Exception):
    """Another thread has failed, and this call ends."""


class Relay:
    """The values of one call that wait for later parts, by micro-batch and name."""

    def __init__(self, executable: Executable, courier: Courier | None = None) -> None:
        self._courier = courier
        self._takes = {program.name: _takes(program, executable) for program in executable.steps}
        self._gives = {program.name: tuple(spec.name for spec in program.returned) for program in executable.steps}
        self._guarding = {program.name for program in executable.steps if program.guards}
        self._returned = [spec.name for spec in executable.outputs]
        self._last = executable.steps[-1].name if executable.steps else ""
        self._drops = _last_readers(executable)
        self._values: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        self._changed = threading.Condition()
        self._is_given_up = False

    def begin(self) -> None:
        """A new call."""
        self._values.clear()
        self._is_given_up = False

    def give_up(self) -> None:
        """Nobody need wait any longer."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    def run(
        self, program: str, execute: Runner, index: int, micro_batch: Sequence[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Run a part of a micro-batch; gives the outputs of the whole when it was the last part.

        With a courier it never is: `outputs` waits for those of all processes.
        """
        if self._courier is not None:
            self._fetch(self._courier, program, index)
        results = execute(self._wait_for(program, index, micro_batch))
        if self._courier is not None:
            self._courier.send(zip(self._gives[program], results, strict=True), index)
        with self._changed:
            known = self._values[index]
            known.update(zip(self._gives[program], results, strict=True))
            for name in self._drops[program]:
                known.pop(name, None)
            self._changed.notify_all()
            if program != self._last or self._courier is not None:
                return None
            outputs = [known[name] for name in self._returned]
            del self._values[index]
            return outputs

    def outputs(self, index: int) -> list[torch.Tensor]:
        """The outputs of a micro-batch, of which the parts of this process have run."""
        known, courier = self._values.pop(index, {}), self._courier
        assert courier is not None
        return [known[name] if name in known else courier.receive(name, index) for name in self._returned]

    def _fetch(self, courier: Courier, program: str, index: int) -> None:
        """Let other processes hand over what a part needs."""
        known = self._values[index]
        for name in self._takes[program]:
            if isinstance(name, str) and name in courier.incoming and name not in known:
                known[name] = courier.receive(name, index)

    def _wait_for(self, program: str, index: int, micro_batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        takes = self._takes[program]
        known = self._values[index]
        names = [name for name in takes if isinstance(name, str)]
        with self._changed:
            while not all(name in known for name in names) and not self._is_given_up:
                self._changed.wait(_LOOK_SECONDS)
            if self._is_given_up:
                raise GivenUp
        return [known[each] if isinstance(each, str) else micro_batch[each] for each in takes]


def _takes(program: Program, executable: Executable) -> tuple[int | str, ...]:
    """What a part is given: a tensor of the user by its position, or a value by its name."""
    positions = {name: index for index, name in enumerate(executable.user_inputs)}
    passed = program.signature.passed
    return tuple(positions[spec.name] if spec.role is Role.USER_INPUT else spec.name for spec in passed)


def _last_readers(executable: Executable) -> dict[str, tuple[str, ...]]:
    """For each part, the values that nobody reads after it."""
    last: dict[str, str] = {}
    for program in executable.steps:
        for spec in program.signature.outputs:
            if spec.role is OutputRole.BOUNDARY:
                last[spec.name] = program.name
        for spec in program.signature.passed:
            if spec.role is Role.BOUNDARY:
                last[spec.name] = program.name
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, program_name in last.items():
        found[program_name].append(name)
    return {program.name: tuple(found[program.name]) for program in executable.steps}
