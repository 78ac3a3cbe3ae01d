"""What a program cannot do if its replicas are spread over several processes."""

from __future__ import annotations

from collections.abc import Sequence

from poptorch.compiler.wide.collectives import is_exchange
from poptorch.errors import CompileError, explain
from poptorch.executable import Grouping
from poptorch.ir import StepGraph
from poptorch.options import Settings


def check_processes(graph: StepGraph, groupings: Sequence[Grouping], settings: Settings) -> None:
    """Raise for what would only see the replicas of this process, although it is about all of them."""
    processes = settings.processes
    if processes.count == 1:
        return
    options = f"Distributed: process {processes.index} of {processes.count}"
    if any(is_exchange(node) for node in graph.ops.nodes):
        raise CompileError(
            explain(
                "replicas of this model exchange values inside forward, but some of them are in other processes.",
                options=options,
                fix="run all replicas in one process, with Options.replicationFactor",
            )
        )
    if not settings.is_training:
        return
    if groupings:
        raise CompileError(
            explain(
                f"groups of replicas have values of their own for {groupings[0].name}, "
                "but some of their replicas are in other processes.",
                options=options,
                fix="run all replicas in one process, or leave out replicaGrouping",
            )
        )
    if processes.in_order and settings.placement.runs_stages:
        raise CompileError(
            explain(
                "stages that run by themselves work on several micro-batches at once, "
                "so that gradients cannot be added up in order.",
                options="runStages(True), Distributed.orderedReduction(True)",
                fix="leave out one of them",
            )
        )
