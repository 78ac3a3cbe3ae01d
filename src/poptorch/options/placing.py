"""An execution strategy as a frozen value: how blocks become stages, and how stages take turns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from poptorch.enums import AutoStage, Liveness
from poptorch.options.strategies import (
    ExecutionStrategy,
    ParallelPhasedExecution,
    PhasedExecution,
    PipelinedExecution,
    ShardedExecution,
)

_PHASE_STRIDES = {Liveness.OffChipAfterFwdNoOverlap: 2, Liveness.OffChipAfterEachPhase: 4}


class Mode(Enum):
    """How stages take turns."""

    PIPELINED = "pipelined"
    SHARDED = "sharded"
    SERIAL_PHASES = "serial phases"
    PARALLEL_PHASES = "parallel phases"

    @property
    def is_phased(self) -> bool:
        return self in (Mode.SERIAL_PHASES, Mode.PARALLEL_PHASES)


@dataclass(frozen=True)
class StagePlan:
    """What a strategy says about a block that it lists."""

    stage: int
    phase: int
    ipu: int | None


@dataclass(frozen=True)
class StrategyPlan:
    """A strategy: either every block that is met becomes a stage by rule (`auto`), or `listed` names them all."""

    mode: Mode
    auto: AutoStage | None
    listed: tuple[tuple[str, StagePlan], ...]
    liveness: Liveness
    has_separate_backward_phase: bool
    text: str  # as the user would write it

    @classmethod
    def of(cls, strategy: ExecutionStrategy) -> StrategyPlan:
        phased = strategy if isinstance(strategy, PhasedExecution) else None
        stride = 1 if phased is None else _PHASE_STRIDES.get(phased.liveness, 1)
        listed = tuple(
            (block, StagePlan(stage.stage_id, max(stage.phase_id, 0) * stride, stage.ipu_id))
            for block, stage in strategy.stages.items()
        )
        return cls(
            _mode(strategy),
            strategy.auto_stage if isinstance(strategy, PipelinedExecution) else None,
            listed,
            Liveness.AlwaysLive if phased is None else phased.liveness,
            phased is not None and phased.has_separate_backward_phase,
            repr(strategy),
        )

    @property
    def stages(self) -> dict[str, StagePlan]:
        return dict(self.listed)

    @property
    def last_phase(self) -> int:
        """The number of the last forward phase."""
        return max((plan.phase for _, plan in self.listed), default=0)

    @property
    def phases(self) -> int:
        """How many phases a forward pass has, with those in which tensors move."""
        if self.liveness is not Liveness.AlwaysLive:
            return self.last_phase + 4
        return self.last_phase + (2 if self.has_separate_backward_phase else 1)


def _mode(strategy: ExecutionStrategy) -> Mode:
    if isinstance(strategy, ShardedExecution):
        return Mode.SHARDED
    if isinstance(strategy, PipelinedExecution):
        return Mode.PIPELINED
    return Mode.PARALLEL_PHASES if isinstance(strategy, ParallelPhasedExecution) else Mode.SERIAL_PHASES
