"""From the step of one micro-batch to the step of all micro-batches of an update, computed side by side.

In:    a StepGraph, and how many micro-batches and replicas an update has.
Out:   a graph that takes the rows of all micro-batches, returns their outputs one below the other, and updates the
       weights once, by the mean or sum of their gradients.
Keeps: what each micro-batch computes (its rows, its statistics, its random numbers), up to rounding.

The graph is gone through op by op; `values.py` says in which forms a value can be there for all micro-batches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from poptorch.compiler.accumulate import reduced, trained_gradients
from poptorch.compiler.private import refusing_unknown_ops, vmap
from poptorch.compiler.wide.collectives import is_exchange, write_exchange
from poptorch.compiler.wide.demand import is_linear, only_summed
from poptorch.compiler.wide.draws import write_draws
from poptorch.compiler.wide.groups import NO_GROUPS, Groups
from poptorch.compiler.wide.layers import LAYERS
from poptorch.compiler.wide.norms import write_out_norms
from poptorch.compiler.wide.rules import RULES, Op, pointwise, substitute
from poptorch.compiler.wide.state import Chain, write_chain
from poptorch.compiler.wide.values import CannotWiden, Kind, Result, Wide, Writer
from poptorch.ir import (
    Direction,
    GraphBuilder,
    InputSpec,
    Note,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    is_update,
    note_of,
    value_of,
)
from poptorch.ir.ops import as_op, is_random

aten = torch.ops.aten
_KNOWN = ("aten", "prims", "mkldnn", "poptorch")
_CONSTANTS: dict[Any, Callable[[Op], Any]] = {
    aten.zeros_like.default: lambda op: 0,
    aten.ones_like.default: lambda op: 1,
    aten.new_zeros.default: lambda op: 0,
    aten.new_ones.default: lambda op: 1,
    aten.full_like.default: lambda op: op.args[1],
    aten.new_full.default: lambda op: op.args[2],
    aten.empty_like.default: lambda op: 0,
    aten.new_empty.default: lambda op: 0,
}  # ops that take nothing but its size from their first operand, and what they fill it with
_OF_MEMORY = ("as_strided", "as_strided_copy", "as_strided_scatter", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
_WRITING = frozenset(
    {
        "index_put",
        "_unsafe_index_put",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "index_add",
        "index_copy",
        "index_fill",
        "index_reduce",
        "masked_scatter",
        "put",
    }
)  # ops that write at places which their operands tell


@dataclass(frozen=True)
class Widened:
    """A wide step, and how many of its ops are repeated for every micro-batch because nothing better is known."""

    graph: StepGraph
    repeated: int


def widen(graph: StepGraph, width: int, replicas: int, *, averages: bool, groups: Groups = NO_GROUPS) -> Widened:
    """The step for `width` micro-batches, of which number i belongs to replica i % replicas.

    If groups of replicas have weights of their own, it ends where the update begins, with sums of gradients.

    Raises `CannotWiden` with the reason if that would not mean the same.
    """
    _check(graph)
    return _Widening(write_out_norms(graph), width, replicas, groups, averages=averages).run()


def _check(graph: StepGraph) -> None:
    for node in graph.ops.nodes:
        if node.op != "call_function" or node.target is operator.getitem or is_update(node):
            continue
        op = as_op(node.target)
        if op is None:
            raise CannotWiden(f"{node.target} runs a graph of its own")
        arguments = op._schema.arguments  # pyright: ignore[reportPrivateUsage]
        if op.namespace not in _KNOWN or (arguments and arguments[-1].name == "after"):
            raise CannotWiden(f"{op} may do more than compute")
        if op.overloadpacket.__name__ in _OF_MEMORY:
            raise CannotWiden(f"{op} depends on how tensors lie in memory")
        if node.is_impure() and torch.Tag.nondeterministic_seeded not in op.tags:
            raise CannotWiden(f"{op} has an effect")


class _Widening:
    """One graph while it is gone through."""

    def __init__(self, graph: StepGraph, width: int, replicas: int, groups: Groups, *, averages: bool) -> None:
        self._graph, self._replicas, self._groups, self._averages = graph, replicas, groups, averages
        self._builder = GraphBuilder()
        self._writer = Writer(self._builder, width)
        self._gradients = trained_gradients(graph)
        together = [node for name, node in self._gradients.items() if name not in groups.of_replicas]
        self._summed = only_summed(graph, set(together))
        self._chain = Chain.of(graph)
        self._values: dict[fx.Node, Result] = {}
        self._repeated = 0

    def run(self) -> Widened:
        self._take_inputs()
        ops = [node for node in self._graph.ops.nodes if node.op == "call_function"]
        draws = [node for node in ops if is_random(node)]
        self._values.update(write_draws(self._writer, draws, self._replicas))
        done = {*draws, *self._chain.ops}
        for node in ops:
            if node not in done and not is_update(node):
                self._values[node] = self._compute(node)
        self._return_results()
        write_chain(self._writer, self._chain, self._values, self._replicas)
        if self._groups.accumulators:
            self._accumulate()
        else:
            self._update()
        graph = self._graph
        name = f"wide_{graph.name}"
        wide = self._builder.build(name, guards=graph.guards, constants=graph.constants, graphs=graph.graphs)
        return Widened(wide, self._repeated)

    def _take_inputs(self) -> None:
        for spec, node in self._graph.inputs:
            is_rows = spec.role is Role.USER_INPUT
            if is_rows and not spec.shape:
                raise CannotWiden(f"argument {spec.name} has no rows")
            taken = self._builder.input(self._of_all_rows(spec) if is_rows else self._groups.with_entries(spec), node)
            self._values[node] = self._writer.as_folded(taken) if is_rows else self._writer.shared(taken)
        for spec, node in self._graph.inputs:
            if spec.name in self._groups.of_replicas:
                self._values[node] = self._groups.value(self._writer, spec.name, self._builder.copies[node])

    def _of_all_rows(self, spec: InputSpec) -> InputSpec:
        return replace(spec, shape=(spec.shape[0] * self._writer.width, *spec.shape[1:]))

    # ---- ops

    def _compute(self, node: fx.Node) -> Result:
        writer = self._writer
        writer.note = note_of(node) or Note(Direction.FORWARD)
        if node.target is operator.getitem and isinstance(self._values[node.args[0]], tuple):  # pyright: ignore
            return self._sum_if_enough(node, self._values[node.args[0]][node.args[1]])  # pyright: ignore
        op = Op(node, *self._arguments(node), self._summed.__contains__)
        if is_exchange(node):
            return self._sum_if_enough(node, write_exchange(writer, op))
        if all(wide.is_shared for wide in op.operands):
            arguments = substitute(op.args, lambda wide: wide.node)
            named = substitute(op.kwargs, lambda wide: wide.node)
            return writer.shared(writer.call(op.target, *arguments, **named))
        if op.target in _CONSTANTS:
            return self._constant(op)
        if any(wide.kind is Kind.SUMMED for wide in op.operands):
            return self._linear(op)
        return self._sum_if_enough(node, self._apply(op))

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = tuple(_nested(arg, self._values) for arg in node.args)
        return args, {key: _nested(value, self._values) for key, value in node.kwargs.items()}

    def _constant(self, op: Op) -> Wide:
        """The same number everywhere, in every micro-batch."""
        shape, dtype = list(op.shape), value_of(op.node).dtype
        return self._writer.shared(self._writer.call(aten.full.default, shape, _CONSTANTS[op.target](op), dtype=dtype))

    def _linear(self, op: Op) -> Wide:
        assert is_linear(op.node), f"{op.node} needs more than a sum"
        writer = self._writer
        return writer.as_summed(
            writer.call(op.target, *substitute(op.args, writer.summed), **substitute(op.kwargs, writer.summed))
        )

    def _sum_if_enough(self, node: fx.Node, result: Result) -> Result:
        is_one = isinstance(result, Wide) and result.kind in (Kind.FOLDED, Kind.STACKED)
        return self._writer.as_summed(self._writer.summed(result)) if is_one and node in self._summed else result

    def _apply(self, op: Op) -> Result:
        """The result of an op by the first way that is known."""
        rule = LAYERS.get(op.target) or RULES.get(op.target)
        known = as_op(op.target)
        if rule is None and known is not None and torch.Tag.pointwise in known.tags:
            rule = pointwise
        result = None if rule is None else rule(self._writer, op)
        if result is None:
            result = self._map(op)
        if result is None:
            self._repeated += 1
            result = self._repeat(op)
        return result

    def _map(self, op: Op) -> Result | None:
        """What `vmap` makes of an op; None if it does not know how."""
        writer, value = self._writer, value_of(op.node)
        operands = self._with_own_memory(op)
        nodes = [wide.node if wide.is_shared else writer.stacked(wide) for wide in operands]
        over = tuple(None if wide.is_shared else 0 for wide in operands)
        values: list[Any] = [value] if isinstance(value, torch.Tensor) else list(value)

        def single(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = iter(tensors)
            args, kwargs = substitute([op.args, op.kwargs], lambda wide: next(given))  # pyright: ignore
            found: Any = op.target(*args, **kwargs)
            return [part for part in ([found] if isinstance(found, torch.Tensor) else found) if part is not None]

        try:
            with refusing_unknown_ops():
                found = self._builder.inline(writer.note, vmap(single, in_dims=over), *nodes)
        except Exception:  # no rule for the op, or one that does not work with tensors that have no values
            return None
        parts = iter([writer.as_stacked(node) for node in found])
        results = tuple(None if each is None else next(parts) for each in values)
        return results[0] if isinstance(value, torch.Tensor) else results

    def _with_own_memory(self, op: Op) -> list[Wide]:
        """The operands of an op; what it writes into is not the same memory for all micro-batches.

        Engines write into a copy of the first operand, which shares what the operand shares.
        """
        first, *others = op.operands
        if not first.is_shared or op.target.overloadpacket.__name__ not in _WRITING:
            return op.operands
        writer = self._writer
        own = writer.call(aten.clone.default, writer.stacked(first), memory_format=torch.contiguous_format)
        return [writer.as_stacked(own), *others]

    def _repeat(self, op: Op) -> Result:
        """The op for one micro-batch after the other."""
        writer, value = self._writer, value_of(op.node)
        runs: list[fx.Node] = []
        for index in range(writer.width):
            args, kwargs = substitute([op.args, op.kwargs], lambda wide, i=index: writer.unstacked(wide, i))
            runs.append(writer.call(op.target, *args, **kwargs))
        if isinstance(value, torch.Tensor):
            return writer.as_stacked(writer.call(aten.stack.default, runs))
        return tuple(
            None
            if part is None
            else writer.as_stacked(
                writer.call(aten.stack.default, [writer.call(operator.getitem, run, index) for run in runs])
            )
            for index, part in enumerate(value)
        )

    # ---- results

    def _return_results(self) -> None:
        """What is returned for each micro-batch, and arguments that the step changes."""
        arguments = {spec.name for spec in self._graph.signature.user_inputs}
        for spec, node in self._graph.outputs:
            is_returned = spec.role in (OutputRole.USER_OUTPUT, OutputRole.ANCHOR, OutputRole.GUARD)
            if is_returned or (spec.role is OutputRole.NEW_VALUE and spec.name in arguments):
                self._writer.note = note_of(node) or Note(Direction.FORWARD)
                is_number = is_returned and spec.batched and not value_of(node).dim()
                self._builder.output(replace(spec, is_number=is_number), self._result(spec, self._values[node]))

    def _result(self, spec: OutputSpec, wide: Wide) -> fx.Node:
        if spec.role is OutputRole.USER_OUTPUT and not spec.batched:
            if not wide.is_shared:
                raise CannotWiden(f"{spec} is returned once, but may differ between micro-batches")
            return wide.node
        return self._writer.returned(wide)

    def _accumulate(self) -> None:
        """The sums of gradients, added to what an update that is a program of its own takes."""
        writer, builder = self._writer, self._builder
        writer.note = Note(Direction.BACKWARD)
        for name, spec in self._groups.accumulators.items():
            total = self._groups.total(writer, name, self._values[self._gradients[name]])
            before = builder.input(self._groups.with_entries(spec))
            after = writer.call(aten.add.Tensor, before, builder.cast(writer.note, total, spec.dtype))
            builder.output(OutputSpec(spec.name, OutputRole.NEW_VALUE), after)

    def _update(self) -> None:
        """The weight update, by the gradients of all micro-batches together."""
        writer, builder = self._writer, self._builder
        writer.note = Note(Direction.BACKWARD)
        specs = {spec.name: spec for spec, _ in self._graph.outputs if spec.role is OutputRole.GRADIENT}
        totals: dict[fx.Node, fx.Node] = {}
        for name, node in self._gradients.items():
            total, dtype = writer.summed(self._values[node]), value_of(node).dtype
            divisor = writer.width if self._averages else 1
            totals[node] = reduced(builder, writer.note, total, specs[name].accumulated_as, dtype, divisor)
            builder.output(OutputSpec(name, OutputRole.GRADIENT), totals[node])
        shared = {node: wide.node for node, wide in self._values.items() if isinstance(wide, Wide) and wide.is_shared}
        builder.copies = {**shared, **builder.copies, **totals}
        try:
            builder.copy(node for node in self._graph.ops.nodes if is_update(node))
        except KeyError as error:
            raise CannotWiden("the update uses more of a micro-batch than its gradients") from error
        for spec, node in self._graph.outputs:
            if spec.role is OutputRole.NEW_VALUE and is_update(node):
                builder.output(spec, builder.copies[node])


def _nested(value: Any, values: dict[fx.Node, Result]) -> Any:
    """An argument with wide values in place of nodes."""
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, (list, tuple)):
        items = [_nested(item, values) for item in cast("list[Any]", value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value
