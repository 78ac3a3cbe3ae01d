"""`StepGraph` → `Executable`: decide which programs run and how often."""

from __future__ import annotations

from dataclasses import dataclass

from poptorch.compiler.accumulate import drop_intermediates, has_update, split_update
from poptorch.compiler.anchors import plan_anchors, return_anchors
from poptorch.compiler.bounds import check_indices
from poptorch.compiler.passes import Observer, run_passes
from poptorch.compiler.schedule import plan_schedule
from poptorch.compiler.side_by_side import put_side_by_side
from poptorch.enums import MeanReductionStrategy, OutputMode
from poptorch.errors import Error, explain
from poptorch.executable import (
    AnchorPlan,
    Batching,
    Executable,
    GroupBinding,
    Grouping,
    Interface,
    Program,
    StateBinding,
)
from poptorch.ir import Role, StepGraph, verify
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
    names = tensor_names(graph, with_paths=settings.report.module_namescope)
    anchors = plan_anchors(settings.report.anchors, names, settings.batching)
    graph = run_passes(return_anchors(graph, settings.report.anchors, names), settings, observe)
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

    A step with guards is cut too: what it writes must wait until the guards are known to hold.
    """
    if settings.is_training and settings.training.mean_reduction is MeanReductionStrategy.PostAndLoss:
        raise Error(
            explain(
                "MeanReductionStrategy.PostAndLoss is out of range: there is no such reduction any more.",
                fix="choose Running or Post, which give the same result",
            )
        )
    graph, checks = check_indices(graph)
    side = put_side_by_side(graph, around.groupings, anchors, settings)
    graph, is_wide = side.step, side.is_wide
    plan, programs = settings.batching, list[Program]()
    runs = 1 if is_wide else plan.micro_batches_per_update

    def add(graph: StepGraph) -> None:
        verify(graph)
        observe(graph.name, graph)
        programs.append(Program(graph, reads_fixed_state=not settings.is_training))

    waits = settings.is_training and has_update(graph) and runs > 1
    waits = waits or side.update is not None or bool(graph.guards and graph.signature.written)
    if not settings.is_training:
        graph, prepare = hoist(graph, _fixed(graph))
        if prepare is not None:
            add(prepare)
        add(graph)
    elif side.update is not None:
        add(side.update)
        add(graph)
    elif waits and has_update(graph):
        step, update = split_update(graph, settings, runs)
        add(update)
        add(step)
    else:
        add(drop_intermediates(graph))
    programs.reverse()  # the step first
    step = programs[0].graph
    updates = tuple(program.name for program in programs if program.name == "update")
    batching = Batching(
        device_iterations=plan.device_iterations,
        micro_batches_per_update=plan.micro_batches_per_update,
        replicas=plan.replicas,
        sources=plan.sources,
        kept=plan.kept,
        sums=plan.output_mode is OutputMode.Sum,
    )
    schedule = plan_schedule(step.name, updates, plan, waits=waits, is_wide=is_wide)
    state = {spec.name: spec for program in programs for spec in program.state}
    if is_wide:  # the update, if there is one, and the host see one group of replicas at a time
        wide = (spec for program in programs if program.name not in updates for spec in program.state)
        state.update((spec.name, side.groups.without_entries(spec)) for spec in wide)
    return Executable(
        programs=tuple(programs),
        schedule=schedule,
        binding=StateBinding(tuple(state.values()), around.groups, around.groupings),
        batching=batching,
        interface=around.interface,
        checks=checks,
        anchors=anchors,
        tensor_names=names,
        random_seed=settings.engine.random_seed,
    )


def _fixed(graph: StepGraph) -> set[str]:
    """The weights that an inference step only reads."""
    weights = {spec.name for spec in graph.signature.inputs if spec.role in (Role.PARAMETER, Role.BUFFER)}
    return weights - graph.signature.written
