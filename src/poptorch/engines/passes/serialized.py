"""Write out products in pieces for native code.

In:    a StepGraph.
Out:   the same graph in which such a product is a chain of smaller ones. Native code reuses the memory of one for the
       next, and writes each where it belongs in the result.
Keeps: every value up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from poptorch.engines.host import Host
from poptorch.ir import StepGraph, insert, value_of

aten = torch.ops.aten
PRODUCT, OUTER = torch.ops.poptorch.serialized_matmul.default, torch.ops.poptorch.serialized_outer.default
ROWS, INNER, COLUMNS = "input_channels", "reducing_dim", "output_channels"


def write_out_products(graph: StepGraph, host: Host) -> StepGraph:
    """Replace each product in pieces by its pieces."""
    if not any(node.target in (PRODUCT, OUTER) for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if node.target in (PRODUCT, OUTER):
            with ops.inserting_before(node):
                node.replace_all_uses_with(_Pieces(ops, node).result())
            ops.erase_node(node)
    return replace(graph, ops=ops)


# Which dimension of the left operand, of the right one and of the result is cut; without the last, pieces are added up.
_CUTS: dict[Any, dict[str, tuple[int | None, int | None, int | None]]] = {
    PRODUCT: {ROWS: (-2, None, -2), INNER: (-1, -2, None), COLUMNS: (None, -1, -1)},
    OUTER: {ROWS: (-2, -2, None), INNER: (-1, None, 0), COLUMNS: (None, -1, 1)},
}


@dataclass(frozen=True)
class _Pieces:
    """One product, and the graph that its pieces are put into."""

    ops: fx.Graph
    node: fx.Node

    def result(self) -> fx.Node:
        left, right, mode, factor, keep_precision = self.node.args
        of_left, of_right, of_result = _CUTS[self.node.target][str(mode)]
        pairs = [
            (self._piece(left, of_left, index), self._piece(right, of_right, index))
            for index in range(int(factor))  # pyright: ignore
        ]
        if of_result is None:
            dtype: torch.dtype = value_of(self.node).dtype
            widens = bool(keep_precision) and dtype is not torch.float32
            total = self._sum(pairs, widens=widens)
            return self._insert(aten._to_copy.default, total, dtype=dtype) if widens else total
        products = [self._product(*pair) for pair in pairs]
        dim = of_result % value_of(self.node).dim()
        return products[0] if len(products) == 1 else self._insert(aten.cat.default, products, dim)

    def _sum(self, pairs: list[tuple[fx.Node, fx.Node]], *, widens: bool) -> fx.Node:
        total: fx.Node | None = None
        for pair in pairs:
            if widens:
                product = self._insert(aten._to_copy.default, self._product(*pair), dtype=torch.float32)
                total = product if total is None else self._insert(aten.add.Tensor, total, product)
            else:
                total = self._product(*pair, added_to=total)
        assert total is not None
        return total

    def _product(self, left: fx.Node, right: fx.Node, added_to: fx.Node | None = None) -> fx.Node:
        """The product of two pieces by an op that takes operands in any order of memory, and adds without a copy."""
        dims = value_of(self.node).dim()
        added = () if added_to is None else (added_to,)
        if self.node.target is OUTER:
            return self._outer(left, right, added_to)
        if dims == 2:
            return self._insert(aten.addmm.default if added else aten.mm.default, *added, left, right)
        if dims == 3:
            batch = len(value_of(self.node))
            operands = [self._insert(aten.expand.default, each, [batch, -1, -1]) for each in (left, right)]
            return self._insert(aten.baddbmm.default if added else aten.bmm.default, *added, *operands)
        product = self._insert(aten.matmul.default, left, right)
        return self._insert(aten.add.Tensor, *added, product) if added else product

    def _outer(self, left: fx.Node, right: fx.Node, added_to: fx.Node | None) -> fx.Node:
        """The sum of the products of a batch of pairs of matrices."""
        left, right = (
            self._insert(aten.reshape.default, each, [-1, *value_of(each).shape[-2:]]) for each in (left, right)
        )
        turned = self._insert(aten.transpose.int, left, 1, 2)
        if added_to is None:
            size = [value_of(turned).shape[1], value_of(right).shape[2]]
            added_to = self._insert(aten.zeros.default, size, dtype=value_of(right).dtype)
        return self._insert(aten.addbmm.default, added_to, turned, right)

    def _insert(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert(self.ops, self.node, target, *args, **kwargs)

    def _piece(self, operand: Any, dim: int | None, index: int) -> fx.Node:
        factor: Any = self.node.args[3]
        if dim is None:
            return operand
        size = value_of(operand).shape[dim] // factor
        dim %= value_of(operand).dim()
        return self._insert(aten.slice.Tensor, operand, dim, index * size, (index + 1) * size)
