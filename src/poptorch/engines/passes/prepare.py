"""Compute what depends on weights alone when they are taken over, and not in every call.

In:    a StepGraph, with the names of state that nobody changes between calls.
Out:   the same graph without such ops; it takes their results as inputs. The graph that computes them, `prepare`,
       belongs to it.
Keeps: every value.
"""

from __future__ import annotations

from dataclasses import replace

from poptorch.engines.host import Host
from poptorch.ir import StepGraph
from poptorch.ir.control import called_graphs
from poptorch.ir.hoist import hoist

PREPARE = "prepare"


def prepare_weights(graph: StepGraph, host: Host) -> StepGraph:
    """Take ops on fixed state out of the graph."""
    step, prepare = hoist(graph, host.fixed, name="prepared")
    if prepare is None:
        return graph
    called = called_graphs(graph.ops)
    beside = {name: inner for name, inner in graph.graphs.items() if name not in called}  # the draws
    return replace(step, graphs={**beside, **step.graphs, PREPARE: prepare})
