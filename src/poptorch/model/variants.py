"""The programs of one executor, one for each kind of call it has seen, and why each was compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from poptorch._logging import logger
from poptorch.engines import Kernel
from poptorch.errors import ArgumentError
from poptorch.interrupts import run_uninterrupted
from poptorch.model.arguments import CallSpec
from poptorch.model.modes import Flags, ModuleWatch
from poptorch.model.program_state import ProgramState, strides_of
from poptorch.model.tiers import Upgrade
from poptorch.runtime import RunTrace, Session
from poptorch.structure import builder


@dataclass(eq=False)
class Variant:
    """A compiled program with the kind of call and the mode of the submodules that it is for."""

    call: CallSpec
    flags: Flags
    watch: ModuleWatch
    session: Session
    state: ProgramState
    reason: str
    seconds: float
    engine: str  # that runs it now
    upgrade: Upgrade | None = None  # native code that will take the place of its kernels
    is_outdated: bool = False  # whether the optimiser asks for another program
    trace: RunTrace | None = None  # of the last call that ended well
    anchored: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # by that call

    @cached_property
    def result(self) -> Callable[[Sequence[torch.Tensor]], Any]:
        """What puts the outputs of a call together as `forward` returned them."""
        return builder(self.session.executable.interface.result)

    def bind(self) -> None:
        """Let the session work on the tensors that their owners have now."""
        self.session.bind(self.state.tensors())
        self.state.confirm()

    def upgrade_if_ready(self, seconds: float = 0.0) -> None:
        """Go on with native code if it is there, or comes within this time. For the time between two calls."""
        if self.upgrade is None or not self.session.is_settled:
            return
        kernels = self.upgrade.wait(seconds) if seconds else self.upgrade.poll()
        engine = self.upgrade.engine
        if self.upgrade.is_over:
            self.upgrade = None
        if kernels is not None:
            run_uninterrupted(partial(self._exchange, {**self.session.kernels, **kernels}))
            self.engine = engine
            logger.info("%s runs on the %s engine from now on", self.call, engine)

    def _exchange(self, kernels: Mapping[str, Kernel]) -> None:
        """Use other kernels, on state in the layouts that they want; if that fails, all is as it was."""
        before = self.session.kernels
        try:
            self._use(kernels)
        except BaseException:
            self._use(before)
            raise

    def _use(self, kernels: Mapping[str, Kernel]) -> None:
        self.state.lay_out(strides_of(kernels))
        self.session.exchange(kernels, self.state.tensors())
        self.state.confirm()

    def stop_upgrading(self) -> None:
        """End what is compiled in the background; the next call begins it again."""
        if self.upgrade is not None:
            self.upgrade.stop()

    def close(self) -> None:
        """The variant is not needed any more."""
        if self.upgrade is not None:
            self.upgrade.close()
            self.upgrade = None

    def refresh(self, names: Collection[str] | None = None) -> None:
        """Let the session work with the values that the owners have now: of everything, or only of these buffers."""
        self.state.refresh(self.watch, names)
        self.bind()


class Variants:
    """All compiled programs of an executor, in the order in which they were compiled."""

    def __init__(self) -> None:
        self._compiled: list[Variant] = []

    def add(self, variant: Variant) -> None:
        self._compiled.append(variant)

    def remove(self, variant: Variant) -> None:
        variant.close()
        self._compiled.remove(variant)

    def find(self, flags: Flags, args: tuple[Any, ...], kwargs: dict[str, Any], *, exact: bool) -> Variant | None:
        """The program for these flags; if `exact`, also for these arguments."""
        for variant in self._compiled:
            is_usable = variant.flags == flags and not variant.is_outdated
            if is_usable and (not exact or _takes(variant.call, args, kwargs)):
                return variant
        return None

    def drop_outdated(self) -> None:
        for variant in [variant for variant in self._compiled if variant.is_outdated]:
            self.remove(variant)

    def close(self) -> None:
        """None of them is needed any more."""
        for variant in self._compiled:
            variant.close()

    def report(self) -> str:
        """One line per program: what it is for, how long it took to compile, and why it was compiled."""
        rows = [
            f"{number}. {variant.call} in {variant.seconds:.2f} s: {variant.reason}"
            for number, variant in enumerate(self._compiled, start=1)
        ]
        return "\n".join([f"{len(rows)} program(s) compiled", *rows])

    def __iter__(self) -> Iterator[Variant]:
        return iter(self._compiled)

    def __len__(self) -> int:
        return len(self._compiled)


def _takes(call: CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        call.tensors(args, kwargs)
    except ArgumentError:
        return False
    return True
