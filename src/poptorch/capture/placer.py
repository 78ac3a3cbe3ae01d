"""Know in which block of the model `forward` is, and so on which stage and IPU its ops belong."""

from __future__ import annotations

from poptorch.capture.source import current_user_line
from poptorch.enums import AutoStage
from poptorch.errors import AnnotationError, CompileError, explain, nearest
from poptorch.ir import Placement, SourceLine
from poptorch.options import Mode, StagePlan, StrategyPlan


class Placer:
    """The blocks of one capture, in the order in which `forward` enters them."""

    def __init__(self, strategy: StrategyPlan) -> None:
        self._strategy = strategy
        self._stages = strategy.stages
        self._unnamed = 0  # blocks without an id so far
        self._current: Placement | None = Placement()
        self._open = 0  # scopes of blocks that `forward` is in
        self._section = self._ipu = self._phase = 0

    def count_again(self) -> None:
        """Blocks without an id are numbered from 0 on again."""
        self._unnamed = 0

    def next_id(self) -> str:
        """The id of a block that has none."""
        self._unnamed += 1
        return str(self._unnamed - 1)

    def begin(self, block: str, ipu: int | None, *, scoped: bool = False) -> None:
        """From here on ops belong to a block; `end` follows if it is scoped."""
        self._open += scoped
        plan = self._plan(block, ipu)
        chosen = next(choice for choice in (plan.ipu, ipu, plan.stage) if choice is not None)
        if self._strategy.mode is Mode.PARALLEL_PHASES and chosen % 2 != plan.phase % 2:
            raise CompileError(_wrong_side(block, chosen, plan.phase))
        if (chosen, plan.phase) != (self._ipu, self._phase):
            self._section += 1
            self._ipu, self._phase = chosen, plan.phase
        self._current = Placement(block, plan.stage, plan.phase, chosen, self._section)

    def end(self) -> None:
        """From here on ops belong to no block, until another one begins."""
        self._current = None
        self._open -= 1

    def place(self, line: SourceLine | None) -> Placement:
        """Where an op of this line belongs; raises if it is in no block although others are."""
        if self._current is None:
            raise CompileError(_no_block(line, is_nested=self._open > 0))
        return self._current

    def _plan(self, block: str, ipu: int | None) -> StagePlan:
        """The stage of a block: the strategy lists it, or makes one as it meets the block for the first time."""
        auto = self._strategy.auto
        if auto is None:
            if block not in self._stages:
                raise AnnotationError(_unknown(block, self._strategy))
            return self._stages[block]
        if auto is AutoStage.AutoIncrement:
            return self._stages.setdefault(block, StagePlan(len(self._stages) + 1, 0, None))
        if ipu is None:
            raise AnnotationError(_no_ipu(block))
        return StagePlan(ipu, 0, None)


def _no_block(line: SourceLine | None, *, is_nested: bool) -> str:
    after = "the end of a Block inside another one, which ended both" if is_nested else "the end of a Block"
    return explain(
        f"No active Block: this operation comes after {after}, and belongs to none.",
        where=str(line),
        fix="put it into a poptorch.Block of its own, or begin blocks with poptorch.BeginBlock or Block.start, which "
        "last until the next one begins",
    )


def _wrong_side(block: str, ipu: int, phase: int) -> str:
    side = "an even" if phase % 2 == 0 else "an odd"
    return explain(
        f"block {block!r} is in phase {phase} and on IPU {ipu}, but in ParallelPhasedExecution even phases run on even "
        "IPUs and odd phases on odd ones.",
        where=str(current_user_line()),
        fix=f"give the stage {side} IPU: strategy.phase({phase}).ipus(...)",
    )


def _unknown(block: str, strategy: StrategyPlan) -> str:
    return explain(
        f"Unknown Block {block!r}: it appears in the model but belongs to no stage{nearest(block, strategy.stages)}",
        where=str(current_user_line()),
        options=strategy.text,
        fix=f"add {block!r} to the strategy, or use one of the names listed there",
    )


def _no_ipu(block: str) -> str:
    return explain(
        f"block {block!r} has no ipu_id, but with poptorch.AutoStage.SameAsIpu the IPU of a block is its stage: "
        "no IPU was specified.",
        where=str(current_user_line()),
        fix="write Block(..., ipu_id=0), or set PipelinedExecution(poptorch.AutoStage.AutoIncrement)",
    )
