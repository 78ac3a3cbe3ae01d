"""Execution strategies: which blocks of a model form a stage or a phase, and how stages take turns.

A strategy never changes what a model computes, only where and when an IPU computes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, cast

from typing_extensions import Self

from poptorch.enums import AutoStage, Liveness
from poptorch.errors import OptionError, nearest
from poptorch.options.checks import boolean, integer, member, not_negative, text
from poptorch.options.group import show


class Stage:
    """One or more blocks that run on the same IPU.

    >>> import poptorch
    >>> poptorch.Stage("encoder", "head").ipu(1)
    Stage('encoder', 'head').ipu(1)
    """

    def __init__(self, *block_ids: str) -> None:
        for block in block_ids:
            if not isinstance(block, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise OptionError(f"a Stage lists the ids of blocks, which are strings, not {block!r}")
        self._blocks = block_ids
        self.stage_id = -1
        self.phase_id = -1
        self.ipu_id: int | None = None

    @property
    def blocks(self) -> tuple[str, ...]:
        """The ids of the blocks."""
        return self._blocks

    def ipu(self, ipu: int) -> Self:
        """Run this stage on the IPU with this number."""
        self.ipu_id = not_negative("Stage.ipu", ipu)
        return self

    def __repr__(self) -> str:
        where = "" if self.ipu_id is None else f".ipu({self.ipu_id})"
        return f"Stage({', '.join(map(repr, self._blocks))}){where}"


class Phase:
    """Stages that run at the same time: `Phase(stage, stage)`, or `Phase("a", "b")` for one stage with these blocks."""

    def __init__(self, *arg: Stage | str) -> None:
        if not arg:
            raise OptionError("a Phase needs at least one Stage or block id")
        if all(isinstance(item, Stage) for item in arg):
            self.stages = cast("tuple[Stage, ...]", arg)
        elif all(isinstance(item, str) for item in arg):
            self.stages = (Stage(*cast("tuple[str, ...]", arg)),)
        else:
            raise OptionError(f"a Phase takes Stages only or block ids only, not {', '.join(map(repr, arg))}")

    def stage(self, idx: int) -> Stage:
        """The stage with this index."""
        if not 0 <= integer("Phase.stage", idx) < len(self.stages):
            raise OptionError(f"there is no stage {idx} in a phase of {len(self.stages)} stages")
        return self.stages[idx]

    def ipus(self, *ipus: int) -> None:
        """Run the stages on these IPUs, one for each stage."""
        if len(ipus) != len(self.stages):
            raise OptionError(f"Phase.ipus got {len(ipus)} IPUs for {len(self.stages)} stages: give one for each")
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)

    def __repr__(self) -> str:
        return f"Phase({', '.join(map(repr, self.stages))})"


class ExecutionStrategy(ABC):
    """What all strategies have in common: a stage for each block that they list."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages: dict[str, Stage] = {}
        for stage in stages:
            for block in stage.blocks:
                if self._stages.setdefault(block, stage) is not stage:
                    raise OptionError(f"block {block!r} is associated with more than one stage: list it once")

    def stage(self, block_id: str) -> Stage:
        """The stage of a block that this strategy lists."""
        if text("stage", block_id) not in self._stages:
            raise OptionError(f"Unknown block {block_id!r}{nearest(block_id, self._stages)}")
        return self._stages[block_id]

    @property
    def stages(self) -> dict[str, Stage]:
        """The stage of every block that this strategy lists."""
        return dict(self._stages)

    @abstractmethod
    def backendOptions(self) -> dict[str, Any]:
        """The keys that this strategy contributes to `Options.toDict()`."""


class PipelinedExecution(ExecutionStrategy):
    """Stages work at the same time on different micro-batches; the default.

    Takes nothing or an `AutoStage`, and blocks become stages as they are met; or one item per stage: a block id, a list
    of block ids, or a `Stage`.

    >>> import poptorch
    >>> poptorch.PipelinedExecution("encoder", ["decoder", "head"]).stage("head")
    Stage('decoder', 'head')
    """

    _MODE = 0

    def __init__(self, *args: AutoStage | Stage | str | list[str] | tuple[str, ...]) -> None:
        self._auto_stage: AutoStage | None = None
        self._listed: tuple[Stage, ...] = ()
        if not args:
            self._auto_stage = AutoStage.SameAsIpu
        elif len(args) == 1 and isinstance(args[0], AutoStage):
            self._auto_stage = args[0]
        else:
            self._listed = tuple(_stage(item) for item in args)
        for index, stage in enumerate(self._listed):
            stage.stage_id = index
        super().__init__(self._listed)

    @property
    def auto_stage(self) -> AutoStage | None:
        """How blocks become stages; None if every stage is listed."""
        return self._auto_stage

    def backendOptions(self) -> dict[str, Any]:
        """The keys that this strategy contributes to `Options.toDict()`."""
        return {"execution_mode": self._MODE}

    def __repr__(self) -> str:
        shown = [show(self._auto_stage)] if self._auto_stage is not None else [repr(stage) for stage in self._listed]
        return f"{type(self).__name__}({', '.join(shown)})"


class ShardedExecution(PipelinedExecution):
    """Stages take turns: one micro-batch passes through all of them before the next one starts."""

    _MODE = 1


class PhasedExecution(ExecutionStrategy):
    """Phases run one after another, with weights and activations moved off the IPU in between."""

    _SERIAL: bool

    def __init__(self, *phases: Phase | list[Any] | tuple[Any, ...] | Stage | str) -> None:
        if len(phases) == 1 and isinstance(phases[0], (list, tuple)):
            inner = phases[0]
            if any(isinstance(item, (Phase, list, tuple)) for item in inner):  # the form that older documents show
                phases = tuple(inner)
        if not phases:
            raise OptionError(f"{type(self).__name__} needs at least one phase")
        self._phases = [_phase(item) for item in phases]
        for index, phase in enumerate(self._phases):
            for position, stage in enumerate(phase.stages):
                stage.stage_id, stage.phase_id = position, index
        self._liveness = Liveness.AlwaysLive
        self._separate_backward_phase = False
        super().__init__(stage for phase in self._phases for stage in phase.stages)

    @property
    def liveness(self) -> Liveness:
        """When tensors leave the IPU."""
        return self._liveness

    @property
    def has_separate_backward_phase(self) -> bool:
        """Whether the backward pass of the last phase has a phase of its own."""
        return self._separate_backward_phase

    def phase(self, phase: int) -> Phase:
        """The phase with this index."""
        if not 0 <= integer("phase", phase) < len(self._phases):
            raise OptionError(f"there is no phase {phase}: phases have the indices 0 to {len(self._phases) - 1}")
        return self._phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> Self:
        """Give the backward pass of the last phase a phase of its own (default: shared with the forward pass)."""
        self._separate_backward_phase = boolean("useSeparateBackwardPhase", use)
        return self

    def backendOptions(self) -> dict[str, Any]:
        """The keys that this strategy contributes to `Options.toDict()`."""
        return {
            "execution_mode": 2,
            "serial_phases_execution": self._SERIAL,
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": self._liveness,
        }

    def __repr__(self) -> str:
        phases = ", ".join(map(repr, self._phases))
        separate = ".useSeparateBackwardPhase()" if self._separate_backward_phase else ""
        return f"{type(self).__name__}({phases}){separate}{self._shown_liveness()}"

    @abstractmethod
    def _shown_liveness(self) -> str:
        """The call that set the liveness, if it is not the default."""


class SerialPhasedExecution(PhasedExecution):
    """All phases run on the same IPUs, one after another."""

    _SERIAL = True

    def setTensorsLiveness(self, liveness: Liveness) -> Self:
        """Say when tensors leave the IPU (default: `Liveness.AlwaysLive`)."""
        self._liveness = member("setTensorsLiveness", liveness, Liveness)
        return self

    def _shown_liveness(self) -> str:
        is_default = self._liveness is Liveness.AlwaysLive
        return "" if is_default else f".setTensorsLiveness({show(self._liveness)})"


class ParallelPhasedExecution(PhasedExecution):
    """Phases alternate between two groups of IPUs: even phases on even IPUs, odd phases on odd ones."""

    _SERIAL = False

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> Self:
        """Move tensors off the IPU after their forward phase (default: they stay)."""
        is_off = boolean("sendTensorsOffChipAfterFwd", off_chip)
        self._liveness = Liveness.OffChipAfterFwd if is_off else Liveness.AlwaysLive
        return self

    def _shown_liveness(self) -> str:
        return "" if self._liveness is Liveness.AlwaysLive else ".sendTensorsOffChipAfterFwd()"


def _stage(item: object) -> Stage:
    if isinstance(item, Stage):
        return item
    if isinstance(item, str):
        return Stage(item)
    if isinstance(item, (list, tuple)):
        return Stage(*cast("Iterable[str]", item))
    raise OptionError(f"a stage is a poptorch.Stage, a block id or a list of block ids, not {item!r}")


def _phase(item: object) -> Phase:
    if isinstance(item, Phase):
        return item
    if isinstance(item, (Stage, str)):
        return Phase(item)
    if isinstance(item, (list, tuple)):
        return Phase(*cast("Iterable[Stage | str]", item))
    raise OptionError(f"a phase is a poptorch.Phase, a Stage, a block id or a list of these, not {item!r}")
