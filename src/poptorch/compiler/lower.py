"""`StepGraph` → `Executable`: decide which programs run and how often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poptorch.compiler.accumulate import drop_intermediates, has_update, keeps_running_mean, split_update
from poptorch.compiler.anchors import plan_anchors, return_anchors
from poptorch.compiler.bounds import check_indices
from poptorch.compiler.draws_first import draw_first
from poptorch.compiler.overlap import check_overlap
from poptorch.compiler.passes import Observer, run_passes
from poptorch.compiler.passes.place import parameter_placements, place_ops
from poptorch.compiler.prints import name_prints
from poptorch.compiler.schedule import plan_schedule, stage_schedule, with_reduction
from poptorch.compiler.sections import Sections, check_ipus, check_sections, log_placements, recomputes_stages
from poptorch.compiler.several_processes import check_processes
from poptorch.compiler.sharding import take_rows
from poptorch.compiler.shares import check_shares, take_share
from poptorch.compiler.side_by_side import Side, put_side_by_side
from poptorch.compiler.stage_updates import split_update as update_parts
from poptorch.compiler.stages import split_stages
from poptorch.compiler.timelines import plan_timeline
from poptorch.enums import MeanReductionStrategy, OutputMode
from poptorch.errors import Error, explain
from poptorch.executable import (
    AnchorPlan,
    Batching,
    Executable,
    GroupBinding,
    Grouping,
    Interface,
    Part,
    Program,
    Schedule,
    StateBinding,
    Timeline,
)
from poptorch.ir import OutputSpec, Role, StepGraph, verify
from poptorch.ir.hoist import hoist
from poptorch.ir.names import tensor_names
from poptorch.options import Settings


@dataclass(frozen=True)
class Surroundings:
    """What an executable says beside its programs: how it is called, and whose its state is."""

    interface: Interface
    groups: tuple[GroupBinding, ...] = ()
    groupings: tuple[Grouping, ...] = ()


def compile_graph(graph: StepGraph, around: Surroundings, settings: Settings, observe: Observer) -> Executable:
    """Run all passes over a captured graph and lower it."""
    check_overlap(graph, around.interface, settings)
    names = tensor_names(graph, with_paths=settings.report.module_namescope)
    anchors = plan_anchors(settings.report.anchors, names, settings.batching)
    log_placements(names, Sections.of(graph), settings)
    graph = name_prints(return_anchors(graph, settings.report.anchors, names), names)
    graph = run_passes(graph, settings, observe)
    return lower(graph, around, settings, observe, anchors, (*names.values, *names.state))


def lower(
    graph: StepGraph,
    around: Surroundings,
    settings: Settings,
    observe: Observer,
    anchors: tuple[AnchorPlan, ...] = (),
    names: tuple[str, ...] = (),
) -> Executable:
    """Make the programs: one that does everything if each micro-batch is an update of its own, otherwise two.

    A step with guards is cut too: what it writes must wait until the guards are known to hold. If stages are to be run
    by themselves, there is a program for each part of a section.
    """
    if settings.is_training and settings.training.mean_reduction is MeanReductionStrategy.PostAndLoss:
        raise Error(
            explain(
                "MeanReductionStrategy.PostAndLoss is out of range: there is no such reduction any more.",
                fix="choose Running or Post, which give the same result",
            )
        )
    check_processes(graph, around.groupings, settings)
    graph, checks = check_indices(graph)
    sections = Sections.of(graph)
    check_sections(graph, sections, settings)
    check_ipus(sections, settings)
    check_shares(sections, settings)
    timeline = plan_timeline(sections, settings, recomputes=recomputes_stages(sections, settings))
    is_cut = settings.placement.runs_stages and sections.count > 1
    side = Side(graph, is_wide=False) if is_cut else put_side_by_side(graph, around.groupings, anchors, settings)
    programs = _Programs.of(side, sections, settings, is_cut=is_cut)
    for each in programs.all:
        verify(each)
        observe(each.name, each)
    plan = settings.batching
    state = {spec.name: spec for each in programs.all for spec in each.signature.state}
    if side.is_wide:  # the update, if there is one, and the host see one group of replicas at a time
        wide = (spec for each in programs.all if each not in programs.updates for spec in each.signature.state)
        state.update((spec.name, side.groups.without_entries(spec)) for spec in wide)
    whole = Executable(
        programs=tuple(Program(each, reads_fixed_state=not settings.is_training) for each in programs.all),
        schedule=_schedule(programs, timeline, sections, settings, is_wide=side.is_wide),
        binding=StateBinding(tuple(state.values()), around.groups, around.groupings),
        batching=Batching(
            device_iterations=plan.device_iterations,
            micro_batches_per_update=plan.micro_batches_per_update,
            replicas=plan.replicas,
            sources=plan.sources,
            kept=plan.kept,
            sums=plan.output_mode is OutputMode.Sum,
        ),
        interface=around.interface,
        checks=checks,
        anchors=anchors,
        tensor_names=names,
        random_seed=settings.engine.random_seed,
        outputs=_returned(programs.whole),
        timeline=timeline,
    )
    if settings.processes.parts > 1:
        return take_share(whole, sections, settings.processes)
    return take_rows(whole, settings.processes, observe) if settings.processes.shares_rows else whole


@dataclass(frozen=True)
class _Programs:
    """The graphs that become programs: what runs for every micro-batch, whole or in parts, then what runs rarely."""

    whole: StepGraph
    parts: Mapping[Part, StepGraph]  # of the whole; empty if it stays whole
    updates: tuple[StepGraph, ...]
    prepare: StepGraph | None
    waits: bool  # for a commit to make final what micro-batches write

    @classmethod
    def of(cls, side: Side, sections: Sections, settings: Settings, *, is_cut: bool) -> _Programs:
        graph, prepare, updates = side.step, None, tuple[StepGraph, ...]()
        runs = 1 if side.is_wide else settings.batching.micro_batches_per_update
        trains = settings.is_training and has_update(graph)
        waits = (trains and (is_cut or runs > 1 or settings.processes.count > 1)) or side.update is not None
        waits = waits or (bool(graph.guards) and bool(graph.signature.written))
        if not settings.is_training:
            if settings.processes.parts == 1:  # weights of other processes are not here
                graph, prepare = hoist(graph, _fixed(graph))
        elif side.update is not None:
            updates = (side.update,)
        elif waits and trains:
            graph, update = split_update(graph, settings, runs)
            updates = (update,)
        else:
            graph = drop_intermediates(graph)
        if not is_cut:
            return cls(graph, {}, updates, prepare, waits)
        waits = waits or bool(graph.signature.written) or graph.draws_random_numbers
        placed = place_ops(draw_first(graph), settings)
        parts = split_stages(placed, sections.count, recomputes=recomputes_stages(sections, settings))
        if settings.processes.parts > 1:  # where each process takes its part of the update
            return cls(graph, parts, updates, prepare, waits)
        homes = {name: placement.section for name, placement in parameter_placements(placed).items()}
        return cls(graph, parts, tuple(part for each in updates for part in update_parts(each, homes)), prepare, waits)

    @property
    def all(self) -> tuple[StepGraph, ...]:
        """Every program, those of micro-batches first."""
        prepare = () if self.prepare is None else (self.prepare,)
        return (*(self.parts.values() or (self.whole,)), *self.updates, *prepare)


def _schedule(
    programs: _Programs, timeline: Timeline, sections: Sections, settings: Settings, *, is_wide: bool
) -> Schedule:
    updates, plan = tuple(update.name for update in programs.updates), settings.batching
    if programs.parts:
        parts = frozenset(programs.parts)
        schedule = stage_schedule(timeline, parts, updates, plan, waits=programs.waits, ipus=sections.ipus)
    else:
        step, waits = programs.whole.name, programs.waits
        schedule = plan_schedule(step, updates, plan, waits=waits, is_wide=is_wide, ipus=sections.ipus)
    if settings.processes.count == 1 or not updates:
        return schedule
    averages = settings.processes.in_order and keeps_running_mean(settings)
    return with_reduction(schedule, _gradient_sums(programs.updates), settings.processes, averages=averages)


def _gradient_sums(updates: Sequence[StepGraph]) -> tuple[str, ...]:
    """The accumulators that hold gradients of parameters, each once."""
    state = [spec for update in updates for spec in update.signature.state]
    return tuple(dict.fromkeys(spec.name for spec in state if spec.role is Role.ACCUMULATOR and spec.owner))


def _returned(step: StepGraph) -> tuple[OutputSpec, ...]:
    """What a micro-batch gives back."""
    return Program(step).returned


def _fixed(graph: StepGraph) -> set[str]:
    """The weights that an inference step only reads."""
    weights = {spec.name for spec in graph.signature.inputs if spec.role in (Role.PARAMETER, Role.BUFFER)}
    return weights - graph.signature.written
