"""Keep weights of convolutions in the memory layout that makes native code fastest: channels innermost.

In:    a StepGraph.
Out:   the same graph that takes these weights, and everything that is updated together with them, in that layout.
Keeps: every op.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from poptorch.engines.host import Host
from poptorch.ir import InputSpec, StepGraph, describe

aten = torch.ops.aten
_BOUND_TO_STRIDES = frozenset({aten.as_strided.default, aten.as_strided_scatter.default})
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolution_weights(graphs: Iterable[StepGraph]) -> frozenset[str]:
    """The weights of all convolutions; none if a program counts on how they lie in memory."""
    weights: set[str] = set()
    for graph in graphs:
        names = {node: spec.name for spec, node in graph.inputs}
        for node in graph.ops.nodes:
            if node.target in _BOUND_TO_STRIDES:
                return frozenset()
            if node.target is aten.convolution.default and node.args[1] in names:
                weights.add(names[node.args[1]])
    return frozenset(weights)


def use_channels_last(graph: StepGraph, host: Host) -> StepGraph:
    """Take what belongs to these weights with channels innermost."""
    changed = {spec.name: _laid_out(spec) for spec in graph.signature.state if spec.owner in host.channels_last}
    if all(changed[spec.name] == spec for spec in graph.signature.state if spec.name in changed):
        return graph
    inputs = tuple(changed.get(spec.name, spec) for spec in graph.signature.inputs)
    laid_out = replace(graph, ops=graph.copy_ops(), signature=replace(graph.signature, inputs=inputs))
    for spec, node in laid_out.inputs:
        node.meta = {**node.meta, "val": describe(spec)}
    return laid_out


def _laid_out(spec: InputSpec) -> InputSpec:
    if len(spec.shape) not in _FORMATS:
        return spec
    like = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    return replace(spec, stride=tuple(like.to(memory_format=_FORMATS[len(spec.shape)]).stride()))
