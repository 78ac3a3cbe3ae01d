"""The semantic passes: what the program is on an IPU system. They are applied in this order."""

from __future__ import annotations

from collections.abc import Callable

from poptorch.compiler.passes.canonicalize import canonicalize
from poptorch.compiler.passes.dead import remove_dead_ops
from poptorch.compiler.passes.fold_norm import fold_batch_norm
from poptorch.compiler.passes.hints import settle_hints
from poptorch.compiler.passes.pieces import join_pieces
from poptorch.compiler.passes.place import place_ops
from poptorch.compiler.passes.recompute import recompute_activations
from poptorch.compiler.passes.rounding import round_at_random
from poptorch.ir import StepGraph, verify
from poptorch.options import Settings

Pass = Callable[[StepGraph, Settings], StepGraph]
Observer = Callable[[str, StepGraph], None]

PASSES: tuple[Pass, ...] = (
    settle_hints,
    canonicalize,
    fold_batch_norm,
    join_pieces,
    round_at_random,
    place_ops,
    recompute_activations,
    remove_dead_ops,
)


def run_passes(graph: StepGraph, settings: Settings, observe: Observer) -> StepGraph:
    """Apply every pass in order; verify each new graph, and observe the graph after each pass."""
    verify(graph)
    observe("capture", graph)
    for apply in PASSES:
        before, graph = graph, apply(graph, settings)
        if graph is not before:
            verify(graph)
        observe(apply.__name__, graph)
    return graph
