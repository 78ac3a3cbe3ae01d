"""The sections of a step: the stretches of `forward` on one IPU each, and what strategies demand of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import fx

from poptorch._logging import logger
from poptorch.compiler.passes.place import has_blocks
from poptorch.errors import CompileError, Error, explain
from poptorch.ipu import reserved_ipus
from poptorch.ir import Direction, Note, Placement, Role, StepGraph, note_of
from poptorch.ir.names import Names
from poptorch.options import Mode, Settings


@dataclass(frozen=True)
class Sections:
    """The placement of each section, in the order of `forward`; one for a model without blocks."""

    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, graph: StepGraph) -> Sections:
        """The sections of a placed graph; one without ops is on the IPU of the one before."""
        found: dict[int, Placement] = {}
        for node in graph.ops.nodes if has_blocks(graph) else ():
            note = note_of(node)
            if note is not None and note.direction is Direction.FORWARD and note.placement is not None:
                found.setdefault(note.placement.section, note.placement)
        placements = [found.get(0, Placement())]
        for section in range(1, max(found, default=0) + 1):
            placements.append(found.get(section, placements[-1]))
        return cls(tuple(placements))

    @property
    def count(self) -> int:
        return len(self.placements)

    @property
    def ipus(self) -> int:
        """How many IPUs a replica takes."""
        return 1 + max(placement.ipu for placement in self.placements)

    def pipeline_stages(self, *, training: bool) -> int:
        """Every section has a backward stage of its own, but the last, where the backward pass begins."""
        return 2 * self.count - 1 if training else self.count


def check_sections(graph: StepGraph, sections: Sections, settings: Settings) -> None:
    """Raise if a pipeline cannot be made of these sections."""
    if settings.placement.strategy.mode is not Mode.PIPELINED or sections.count == 1:
        return
    _check_order(graph)
    _check_parameters(graph)
    _check_micro_batches(sections, settings)


def log_placements(names: Names, sections: Sections, settings: Settings) -> None:
    """Tell at DEBUG where each tensor of forward is computed."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    strategy = settings.placement.strategy
    is_pipelined = strategy.mode is Mode.PIPELINED and len({p.ipu for p in sections.placements}) > 1
    logger.debug("enablePipelining set to value %d", is_pipelined)
    if strategy.mode.is_phased:
        logger.debug("executionPhaseSettings.stages set to value %d", 1 + (strategy.mode is Mode.PARALLEL_PHASES))
        logger.debug("executionPhaseSettings.phases set to value %d", strategy.phases)
        for kind in ("activation", "weight", "optimizer", "accumulator"):
            logger.debug("location_%s set to value useOnChipStorage(False)", kind)
    for name, node in names.values.items():
        note = note_of(node)
        if note is not None and note.direction is Direction.FORWARD and note.placement is not None:
            logger.debug("%s %s", name, _described(note.placement, strategy.mode))


def _described(placement: Placement, mode: Mode) -> str:
    if mode.is_phased:
        return f"mode(Phased), ipu({placement.ipu}), phase({placement.phase})"
    return f"mode({mode.value.capitalize()}), ipu({placement.ipu}), stage({placement.stage})"


def check_ipus(sections: Sections, settings: Settings) -> None:
    """Raise if there are more IPUs than a process can use, or a number that hardware does not have."""
    wanted = settings.placement
    count = sections.ipus * settings.batching.replicas
    reserved_ipus(count, rounds_up=wanted.rounds_up, insists=wanted.uses_ipu_model is False)


def recomputes_stages(sections: Sections, settings: Settings) -> bool:
    """Whether the forward values of a section are computed again for its backward part, instead of being kept.

    In a pipeline, where several micro-batches wait for their backward parts, they are, unless the user decides.
    """
    if not settings.is_training or sections.count == 1:
        return False
    chosen = settings.training.recomputation
    return settings.placement.strategy.mode is Mode.PIPELINED if chosen is None else chosen > 0


def _check_order(graph: StepGraph) -> None:
    """No op may need the result of a later stage."""
    for node in graph.ops.nodes:
        note = note_of(node)
        if not _is_placed_forward(note):
            continue
        for used in node.all_input_nodes:
            before = note_of(used)
            if _is_placed_forward(before) and before.placement.stage > note.placement.stage:  # pyright: ignore
                raise CompileError(_backwards(before, note))  # pyright: ignore[reportArgumentType]


def _is_placed_forward(note: Note | None) -> bool:
    return note is not None and note.direction is Direction.FORWARD and note.placement is not None


def _backwards(before: Note, after: Note) -> str:
    assert before.placement is not None and after.placement is not None
    early, late = after.placement, before.placement
    return explain(
        f"block {early.block!r} is stage {early.stage}, but it needs a result of block {late.block!r}, which is stage "
        f"{late.stage}: stages of a pipeline pass results on to later stages only.",
        where=str(after.line),
        result=str(before.line),
        fix="number the stages in the order of forward: PipelinedExecution(poptorch.AutoStage.AutoIncrement), or list "
        "the blocks in that order",
    )


def _check_parameters(graph: StepGraph) -> None:
    """A parameter lives on one IPU."""
    for spec, node in graph.inputs:
        users = _forward_users(node) if spec.role is Role.PARAMETER else []
        if len({note.placement.ipu for note in users if note.placement is not None}) > 1:
            first, *others = sorted(users, key=lambda note: note.placement.ipu if note.placement else 0)
            raise CompileError(
                explain(
                    f"parameter {spec.name} is used on two IPUs. All pipeline stages using this tensor should be on "
                    "the same graph.",
                    where=f"{first.placement}: {first.line}",
                    also=f"{others[-1].placement}: {others[-1].line}",
                    fix="put the blocks that share it on the same IPU, for example the first and the last stage: "
                    "Block(..., ipu_id=0) with AutoStage.AutoIncrement",
                )
            )


def _forward_users(node: fx.Node) -> list[Note]:
    return [note for user in node.users if (note := note_of(user)) is not None and _is_placed_forward(note)]


def _check_micro_batches(sections: Sections, settings: Settings) -> None:
    """A pipeline must be filled: every stage works on another micro-batch."""
    needed = sections.pipeline_stages(training=settings.is_training)
    plan = settings.batching
    name, given = (
        ("gradientAccumulation", plan.gradient_accumulation)
        if settings.is_training
        else ("deviceIterations", plan.device_iterations)
    )
    if given >= needed:
        return
    more = f", plus an additional {sections.count - 1} stages when training" if settings.is_training else ""
    setter = f"options.Training.{name}" if settings.is_training else f"options.{name}"
    raise Error(
        explain(
            f"{name} must be greater than or equal to the number of pipeline stages ({needed}), but it is {given}.",
            reason=f"the model has {sections.count} pipeline stages{more}",
            fix=f"{setter}({needed}), or setExecutionStrategy(poptorch.ShardedExecution()), which needs no minimum",
        )
    )
