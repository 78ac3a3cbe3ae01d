"""`StepGraph` → `Executable`: decide which programs run and how often."""

from __future__ import annotations

from dataclasses import replace

from poptorch.compiler.accumulate import drop_intermediates, split_update
from poptorch.compiler.anchors import plan_anchors, return_anchors
from poptorch.compiler.bounds import index_checks
from poptorch.compiler.hoist import hoist_weight_ops
from poptorch.compiler.passes import Observer, run_passes
from poptorch.compiler.scatter import scatter_row_gradients
from poptorch.enums import MeanReductionStrategy, OutputMode
from poptorch.errors import Error, explain
from poptorch.executable import Batching, Executable, Program
from poptorch.ir import StepGraph, verify
from poptorch.ir.names import tensor_names
from poptorch.ir.structure import Layout
from poptorch.options import Settings


def compile_graph(graph: StepGraph, result: Layout, settings: Settings, observe: Observer) -> Executable:
    """Run all passes over a captured graph and lower it."""
    names = tensor_names(graph, with_paths=settings.module_namescope)
    anchors = plan_anchors(settings.anchors, names, settings.batching)
    graph = return_anchors(graph, settings.anchors, names)
    executable = lower(run_passes(graph, settings, observe), result, settings, observe)
    return replace(executable, anchors=anchors, tensor_names=(*names.values, *names.state))


def lower(graph: StepGraph, result: Layout, settings: Settings, observe: Observer) -> Executable:
    """Make the programs: one that does everything if each micro-batch is an update of its own, otherwise two.

    A step with guards is cut too: the update must wait until the guards are known to hold.
    """
    if settings.training and settings.strategy is MeanReductionStrategy.PostAndLoss:
        raise Error(
            explain(
                "MeanReductionStrategy.PostAndLoss is out of range: there is no such reduction any more.",
                fix="choose Running or Post, which give the same result",
            )
        )
    plan = settings.batching
    update: Program | None = None
    prepare: Program | None = None
    if not settings.training:
        step, prepare_graph = hoist_weight_ops(graph)
        if prepare_graph is not None:
            verify(prepare_graph)
            observe("prepare", prepare_graph)
            prepare = Program(prepare_graph)
    elif plan.micro_batches_per_update == 1 and not graph.guards:
        step = scatter_row_gradients(drop_intermediates(graph))
    else:
        step, update_graph = split_update(graph, settings)
        step = scatter_row_gradients(step)
        verify(update_graph)
        observe("update", update_graph)
        update = Program(update_graph)
    verify(step)
    observe(step.name, step)
    batching = Batching(
        device_iterations=plan.device_iterations,
        micro_batches_per_update=plan.micro_batches_per_update,
        replicas=plan.replicas,
        sources=plan.sources,
        kept=plan.kept,
        sums=plan.output_mode is OutputMode.Sum,
    )
    program = Program(step, reads_fixed_state=not settings.training)
    return Executable(program, update, prepare, batching, result, index_checks(step), settings.random_seed)
