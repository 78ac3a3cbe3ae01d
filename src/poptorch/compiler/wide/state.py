"""Buffers that a step changes, when several micro-batches of it are computed side by side.

Each replica has buffers of its own, and its micro-batches change them one after the other. That is kept: the few ops
between the old and the new value of a buffer are repeated for every micro-batch, in order, while all else is wide.
It is only possible if nothing else of the step reads what a micro-batch before has written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from poptorch.compiler.wide.values import CannotWiden, Wide, Writer
from poptorch.ir import Direction, InputSpec, Note, OutputRole, OutputSpec, Role, StepGraph, is_update, note_of
from poptorch.ir.ops import is_random, memory_owner

aten = torch.ops.aten
_EARLY = (OutputRole.NEW_VALUE, OutputRole.VALUE_BEFORE_UPDATE)


@dataclass(frozen=True)
class Chain:
    """The buffers that a step changes, and the ops that compute their new values from the old ones."""

    buffers: dict[str, tuple[InputSpec, fx.Node, fx.Node]]  # what it is, its old value, its new value
    ops: tuple[fx.Node, ...]

    @classmethod
    def of(cls, graph: StepGraph) -> Chain:
        """The chain of a step; raises if it is not separate from everything else."""
        inputs = {spec.name: (spec, node) for spec, node in graph.inputs}
        written = {s.name: n for s, n in graph.outputs if s.role in _EARLY and not is_update(n)}
        state = {name: node for name, node in written.items() if inputs[name][0].role is not Role.USER_INPUT}
        for name in state:
            if inputs[name][0].role is not Role.BUFFER:
                raise CannotWiden(f"forward changes {name}, which is no buffer")
        buffers = {name: (*inputs[name], node) for name, node in state.items()}
        ops = _after(graph, {old for _, old, _ in buffers.values()})
        _check(graph, set(ops), set(buffers))
        return cls(buffers, tuple(ops))


def _after(graph: StepGraph, start: set[fx.Node]) -> list[fx.Node]:
    """The ops that depend on these inputs."""
    reached, found = set(start), list[fx.Node]()
    for node in graph.ops.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            found.append(node)
    return found


def _check(graph: StepGraph, ops: set[fx.Node], buffers: set[str]) -> None:
    for node in ops:
        if is_update(node) or is_random(node):
            raise CannotWiden("what one micro-batch writes into a buffer is used by the next")
    old = {node for spec, node in graph.inputs if spec.name in buffers}
    for spec, node in graph.outputs:
        is_new = spec.role is OutputRole.NEW_VALUE and spec.name in buffers
        if node in ops | old and not is_new:
            raise CannotWiden(f"{spec} depends on what the micro-batch before has written into a buffer")


def copy_of(spec: InputSpec, replica: int) -> InputSpec:
    """The buffer of another replica than the first, whose buffers are those of the module."""
    return replace(spec, name=f"{spec.name}:replica{replica}", role=Role.REPLICA, owner=spec.name, key=str(replica))


def write_chain(writer: Writer, chain: Chain, values: dict[fx.Node, Any], replicas: int) -> None:
    """The new values of all buffers of all replicas, as outputs."""
    for replica in range(replicas):
        state = _inputs(writer, chain, replica)
        current = {old: state[name] for name, (_, old, _) in chain.buffers.items()}
        for index in range(replica, writer.width, replicas):
            current = _next(writer, chain, values, current, index)
        for spec, old, _ in chain.buffers.values():
            target = spec.name if replica == 0 else copy_of(spec, replica).name
            result = current[old]
            if memory_owner(result).op == "placeholder":
                result = writer.call(aten.clone.default, result)
            writer.builder.output(OutputSpec(target, OutputRole.NEW_VALUE), result)


def _inputs(writer: Writer, chain: Chain, replica: int) -> dict[str, fx.Node]:
    if replica == 0:
        return {name: writer.builder.copies[old] for name, (_, old, _) in chain.buffers.items()}
    return {name: writer.builder.input(copy_of(spec, replica)) for name, (spec, _, _) in chain.buffers.items()}


def _next(
    writer: Writer, chain: Chain, values: dict[fx.Node, Any], current: dict[fx.Node, fx.Node], index: int
) -> dict[fx.Node, fx.Node]:
    """The buffers after one more micro-batch."""
    known = dict(current)

    def find(node: fx.Node) -> fx.Node:
        if node not in known:
            wide = values[node]
            assert isinstance(wide, Wide)
            known[node] = writer.unstacked(wide, index)
        return known[node]

    for node in chain.ops:
        writer.note = note_of(node) or Note(Direction.FORWARD)
        arguments: Any = fx.map_arg(node.args, find)
        named: Any = fx.map_arg(node.kwargs, find)
        target: Any = node.target
        known[node] = writer.call(target, *arguments, **named)
    return {old: find(new) for _, old, new in chain.buffers.values()}
