"""Weights of which every group of replicas has its own, in a step for all replicas at once.

Such a step takes the weight with one more dimension in front, an entry for each group, and adds up the gradients of
each group apart. The update stays a program of its own, which runs once for each group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from poptorch.compiler.wide.values import Wide, Writer
from poptorch.ir import InputSpec

aten = torch.ops.aten


@dataclass(frozen=True)
class Groups:
    """The group of each replica for every parameter that is grouped, and where gradients are accumulated."""

    of_replicas: Mapping[str, tuple[int, ...]]
    accumulators: Mapping[str, InputSpec]  # by parameter; empty if nothing is trained

    def with_entries(self, spec: InputSpec) -> InputSpec:
        """The input for all groups in place of that for one."""
        if spec.owner not in self.of_replicas:
            return spec
        count = 1 + max(self.of_replicas[spec.owner])
        return replace(spec, shape=(count, *spec.shape), stride=(math.prod(spec.shape), *spec.stride))

    def without_entries(self, spec: InputSpec) -> InputSpec:
        """The input for one group in place of that for all."""
        if spec.owner not in self.of_replicas:
            return spec
        return replace(spec, shape=spec.shape[1:], stride=spec.stride[1:])

    def value(self, writer: Writer, name: str, entries: fx.Node) -> Wide:
        """What each micro-batch sees of a grouped parameter: the entry of its replica."""
        groups = self._of_micro_batches(writer, name)
        parts = [writer.call(aten.select.int, entries, 0, group) for group in groups]
        return writer.as_stacked(writer.call(aten.stack.default, parts))

    def total(self, writer: Writer, name: str, gradient: Wide) -> fx.Node:
        """The sum of the gradients of each group; of all if the parameter is not grouped."""
        if name not in self.of_replicas:
            return writer.summed(gradient)
        groups, sums = self._of_micro_batches(writer, name), dict[int, fx.Node]()
        for index, group in enumerate(groups):
            part = writer.unstacked(gradient, index)
            sums[group] = writer.call(aten.add.Tensor, sums[group], part) if group in sums else part
        return writer.call(aten.stack.default, [sums[group] for group in sorted(sums)])

    def _of_micro_batches(self, writer: Writer, name: str) -> list[int]:
        of_replicas = self.of_replicas[name]
        return [of_replicas[index % len(of_replicas)] for index in range(writer.width)]


NO_GROUPS = Groups({}, {})
