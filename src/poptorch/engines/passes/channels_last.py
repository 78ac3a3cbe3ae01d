"""Keep weights of convolutions in the memory layout that makes native code fastest: channels innermost.

In:    a StepGraph.
Out:   the same graph that takes these weights, and everything that is updated together with them, in that layout, and
       casts them so that they keep it.
Keeps: every op.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.engines.host import Host
from poptorch.ir import InputSpec, StepGraph, describe, insert, value_of

aten = torch.ops.aten
_CAST = aten._to_copy.default
_WEIGHT_OF = {aten.convolution.default: 1, aten.convolution_backward.default: 2}  # the argument that it is
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
            if node.target is aten.convolution.default and (weight := _before_cast(node.args[1])) in names:
                weights.add(names[weight])
    return frozenset(weights)


def _before_cast(value: Any) -> Any:
    """What a value was before it was given other types."""
    while value.target is _CAST:
        value = value.args[0]
    return value


def use_channels_last(graph: StepGraph, host: Host) -> StepGraph:
    """Take what belongs to these weights with channels innermost."""
    changed = {spec.name: _laid_out(spec) for spec in graph.signature.state if spec.owner in host.channels_last}
    if all(changed[spec.name] == spec for spec in graph.signature.state if spec.name in changed):
        return graph
    inputs = tuple(changed.get(spec.name, spec) for spec in graph.signature.inputs)
    laid_out = replace(graph, ops=graph.copy_ops(), signature=replace(graph.signature, inputs=inputs))
    weights: set[fx.Node] = set()
    for spec, node in laid_out.inputs:
        node.meta = {**node.meta, "val": describe(spec)}
        if spec.name in changed and len(spec.shape) in _FORMATS:
            weights.add(node)
    for node in list(laid_out.ops.nodes):
        if node.target in _WEIGHT_OF and _before_cast(weight := node.args[_WEIGHT_OF[node.target]]) in weights:
            _keep_layout(laid_out.ops, node, weight)
    return laid_out


def _keep_layout(graph: fx.Graph, convolution: fx.Node, weight: Any) -> None:
    """Give the cast of a weight with one channel its strides, in which every kernel recognises the layout.

    The elements lie in memory in the same order either way, and a cast alone would have the strides of the other way.
    """
    value = value_of(_before_cast(weight))
    if weight.target is _CAST and value.shape[1] == 1:
        with graph.inserting_before(convolution):
            same = insert(graph, weight, aten.as_strided.default, weight, list(value.shape), list(value.stride()))
        convolution.replace_input_with(weight, same)


def _laid_out(spec: InputSpec) -> InputSpec:
    if len(spec.shape) not in _FORMATS:
        return spec
    like = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    return replace(spec, stride=tuple(like.to(memory_format=_FORMATS[len(spec.shape)]).stride()))
