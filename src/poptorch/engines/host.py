"""What passes of an engine may know about a program beside its graph, and how they are run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from poptorch.ir import StepGraph, is_control, runs_of, verify

Observer = Callable[[str, StepGraph], None]


@dataclass(frozen=True)
class Host:
    """The surroundings of a program on this machine."""

    fixed: frozenset[str] = frozenset()  # the state that nobody changes while the program is bound to it
    channels_last: frozenset[str] = frozenset()  # the parameters whose memory has channels innermost
    fewest_layers: int = 0  # that are alike, from which on they share code; 0 for none


HostPass = Callable[[StepGraph, Host], StepGraph]


def in_bodies_too(apply: HostPass) -> HostPass:
    """A pass that is also applied to what loops and branches run."""

    @functools.wraps(apply)
    def everywhere(graph: StepGraph, host: Host) -> StepGraph:
        changed = apply(graph, host)
        names = [run.graph for node in changed.ops.nodes if is_control(node) for run in runs_of(node)]
        before = {name: changed.graphs[name] for name in names}
        bodies = {name: everywhere(body, host) for name, body in before.items()}
        is_same = all(bodies[name] is body for name, body in before.items())
        return changed if is_same else replace(changed, graphs={**changed.graphs, **bodies})

    return everywhere


def run_host_passes(graph: StepGraph, host: Host, passes: Sequence[HostPass], observe: Observer) -> StepGraph:
    """Apply every pass in order; verify each new graph, and observe the graph after each pass."""
    name = graph.name
    for apply in passes:
        before, graph = graph, apply(graph, host)
        if graph is not before:
            verify(graph)
        observe(f"{name}.{apply.__name__}", graph)
    return graph


def unobserved(name: str, graph: StepGraph) -> None:
    """Nobody looks."""
