"""Exchanges between replicas as ops along the dimension of the replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from poptorch.compiler.wide.rules import Op
from poptorch.compiler.wide.values import Wide, Writer
from poptorch.ir import StepGraph
from poptorch.ir.ops import as_op

aten = torch.ops.aten
_NAMESPACE = "poptorch::replicated_"


def is_exchange(node: fx.Node) -> bool:
    """Whether an op gives a replica values of others."""
    op = as_op(node.target)
    return op is not None and op.name().startswith(_NAMESPACE)


def exchanges(graph: StepGraph) -> bool:
    """Whether replicas of a step depend on each other, so that they cannot run one after the other."""
    return any(is_exchange(node) and node.args[1] != 1 for node in graph.ops.nodes)


def write_exchange(writer: Writer, op: Op) -> Wide:
    """The values that replicas have after an exchange, from those that they have before."""
    x, replicas = op.args
    shape, outer = list(x.shape), writer.width // replicas
    by_replica = writer.reshaped(writer.stacked(x), [outer, replicas, *shape])  # accumulation step, replica, value
    name = op.target.name().removeprefix(_NAMESPACE)
    result = getattr(_Exchange(writer, replicas, outer), name)(by_replica, shape)
    return writer.as_stacked(writer.reshaped(result, [writer.width, *op.shape]))


class _Exchange:
    def __init__(self, writer: Writer, replicas: int, outer: int) -> None:
        self._call, self._writer = writer.call, writer
        self._replicas, self._outer = replicas, outer

    def gather(self, x: fx.Node, shape: list[int]) -> fx.Node:
        """Every replica gets all of them."""
        sizes = [self._outer, self._replicas, self._replicas, *shape]
        return self._call(aten.expand.default, self._call(aten.unsqueeze.default, x, 1), sizes)

    def part(self, x: fx.Node, shape: list[int]) -> fx.Node:
        """Replica r keeps entry r."""
        own = self._call(aten.diagonal.default, x, 0, 1, 2)  # the replicas are the last dimension now
        order = [0, len(shape), *range(1, len(shape))]
        return self._call(aten.permute.default, own, order)

    def sum(self, x: fx.Node, shape: list[int]) -> fx.Node:
        total = self._call(aten.sum.dim_IntList, x, [1], True)
        return self._call(aten.expand.default, total, [self._outer, self._replicas, *shape])

    def exchange(self, x: fx.Node, shape: list[int]) -> fx.Node:
        """Part q of replica r changes places with part r of replica q."""
        sizes: list[Any] = [self._outer, self._replicas, self._replicas, shape[0] // self._replicas, *shape[1:]]
        return self._call(aten.transpose.int, self._writer.reshaped(x, sizes), 1, 2)
