"""Let a step return tensors that users asked for by name, beside what `forward` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from poptorch.enums import OutputMode
from poptorch.errors import Error, nearest
from poptorch.executable import AnchorPlan
from poptorch.ir import OutputRole, OutputSpec, StepGraph, insert
from poptorch.ir.names import Names
from poptorch.ir.ops import memory_owner
from poptorch.options import Anchor, BatchPlan


def plan_anchors(anchors: Mapping[str, Anchor], names: Names, batching: BatchPlan) -> tuple[AnchorPlan, ...]:
    """Which micro-batches each anchor is collected from, and where it is found."""
    plans: list[AnchorPlan] = []
    for short, anchor in anchors.items():
        if anchor.long_name not in names.values and anchor.long_name not in names.state:
            known = [*names.values, *names.state]
            raise Error(
                f"anchorTensor({short!r}, …) asks for {anchor.long_name!r}, which is no tensor of this model"
                f"{nearest(anchor.long_name, known)}. getTensorNames() lists them all."
            )
        plan = _own_plan(anchor, batching)
        state = names.state.get(anchor.long_name)
        plans.append(AnchorPlan(short, state, frozenset(plan.kept), plan.output_mode is OutputMode.Sum))
    return tuple(plans)


def _own_plan(anchor: Anchor, batching: BatchPlan) -> BatchPlan:
    """The batch arithmetic of an anchor; the model's if its own does not work out."""
    mode, period = anchor.output_mode, anchor.output_return_period
    is_model_mode = mode is None or mode is OutputMode.Default
    if is_model_mode or (mode is OutputMode.EveryN and batching.device_iterations % period):
        return batching
    return replace(batching, output_mode=mode, output_period=period)


def return_anchors(graph: StepGraph, anchors: Mapping[str, Anchor], names: Names) -> StepGraph:
    """The same step with one more output for each anchor that it computes, after the user's."""
    wanted = {short: names.values[a.long_name] for short, a in anchors.items() if a.long_name in names.values}
    if not wanted:
        return graph
    ops = graph.copy_ops()
    copies = {node.name: node for node in ops.nodes}
    found = {short: _result(ops, copies[node.name]) for short, node in wanted.items()}
    specs, results = list(graph.signature.outputs), list[fx.Node](ops.output_node().args[0])  # pyright: ignore
    first = sum(spec.role is OutputRole.USER_OUTPUT for spec in specs)
    specs[first:first] = [OutputSpec(short, OutputRole.ANCHOR) for short in found]
    results[first:first] = found.values()
    ops.output_node().args = (tuple(results),)
    return replace(graph, ops=ops, signature=replace(graph.signature, outputs=tuple(specs)))


def _result(ops: fx.Graph, node: fx.Node) -> fx.Node:
    """A value to return; one that shows the memory of an input is copied, because the input may change."""
    if memory_owner(node).op != "placeholder":
        return node
    with ops.inserting_before(ops.output_node()):
        return insert(ops, node, torch.ops.aten.clone.default, node)
