"""See to it that no index out of range reaches native code, which would stop the whole process.

What is known to be in range needs nothing. Integers that follow from arguments, buffers and constants in a few ops
are checked before a call runs. All others, those that depend on weights, random numbers or a long computation, become
guards of the program: it brings them into range before it uses them, and tells which they were.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from poptorch.compiler.guarded_bodies import GuardedBody, tell_findings
from poptorch.compiler.indices import index_uses
from poptorch.compiler.intervals import known_intervals
from poptorch.errors import CompileError, explain
from poptorch.executable import IndexCheck, first_wrong, out_of_range
from poptorch.ir import (
    GraphBuilder,
    Guard,
    InputSpec,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    insert,
    is_control,
    note_of,
    repeat_while,
    runs_of,
    value_of,
)
from poptorch.ir.ops import ancestors, has_effect, is_random
from poptorch.ir.python import as_function
from poptorch.ir.ranges import WITHIN, Range
from poptorch.ir.source import SourceLine

aten = torch.ops.aten
_LONGEST_COMPUTATION = 32  # ops between the inputs and an index that are worth running a second time

_KEEPS_ELEMENTS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.clone.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.expand.default,
        aten._to_copy.default,
        WITHIN,
    }
)


def check_indices(graph: StepGraph) -> tuple[StepGraph, tuple[IndexCheck, ...]]:
    """The graph with safe indices and without markers, and the checks to make before it runs."""
    if not _uses_indices(graph):
        return graph, ()
    bounds = _Bounds(replace(graph, ops=graph.copy_ops()))
    return bounds.guarded_graph(), tuple(bounds.checks.values())


def _uses_indices(graph: StepGraph) -> bool:
    own = any(True for node in graph.ops.nodes for _ in index_uses(node))
    return own or any(map(_uses_indices, graph.graphs.values()))


class _Bounds:
    """The indices of one graph, which is changed on the way. Nothing is known about what a body is given."""

    def __init__(self, graph: StepGraph, *, is_body: bool = False) -> None:
        self._is_body = is_body
        self.checks: dict[Any, IndexCheck] = {}
        self._graph, self._ops = graph, graph.ops
        self._known = known_intervals(graph.ops)
        self._specs = {node: spec for spec, node in graph.inputs}
        self._inputs = [node for node, spec in self._specs.items() if spec.role is Role.USER_INPUT]
        self._guards: list[tuple[Guard, fx.Node]] = []
        self._safe: dict[fx.Node, fx.Node] = {}  # what indices were replaced by
        for node in list(self._ops.nodes):
            if is_control(node):
                self._see_inside(node)
            for index, allowed in list(index_uses(node)):
                self._see_to(node, index, allowed)

    def _see_inside(self, node: fx.Node) -> None:
        """Make sure of the same in what a node runs."""
        bodies = [_guarded_body(self._graph.graphs[run.graph]) for run in runs_of(node)]
        if node.target is repeat_while and bodies[0].findings:
            raise _unsafe_condition(bodies[0].findings[0][0])
        graphs, findings = tell_findings(self._ops, node, bodies)
        self._graph = replace(self._graph, graphs={**self._graph.graphs, **graphs})
        self._guards += findings

    def _see_to(self, node: fx.Node, index: fx.Node, allowed: Range) -> None:
        """Make sure that an op gets no integer that it does not take."""
        while index in self._safe:
            index = self._safe[index]
        least, greatest = self._known.get(index, (None, None))
        if least is not None and greatest is not None and allowed.low <= least and greatest <= allowed.high:
            return
        note = note_of(node)
        line = None if note is None else note.line
        needed = {n for n in ancestors([index]) if n.target is not WITHIN}
        sources = [self._specs[n] for n in needed if n.op == "placeholder"]
        is_fixed = not any(is_random(n) or has_effect(n) or is_control(n) for n in needed)
        is_given = all(map(self._is_given, sources)) and is_fixed
        if is_given and not sources:
            self._check_now(index, allowed, line)
        elif is_given and len(needed) <= _LONGEST_COMPUTATION:
            self._check_before(index, needed, allowed, line)
        else:
            self._guard(node, index, allowed, line)

    def _is_given(self, spec: InputSpec) -> bool:
        """Whether an input is known before a call runs, and small enough to compute with a second time."""
        if self._is_body:
            return False
        if spec.role is Role.USER_INPUT:
            return True
        return spec.role in (Role.BUFFER, Role.CONSTANT) and spec.name not in self._graph.signature.written

    def _check_now(self, index: fx.Node, allowed: Range, line: SourceLine | None) -> None:
        """Check integers that are the same in every call."""
        wrong = first_wrong(as_function(self._computation(index, []).ops)()[0], allowed)
        if wrong is not None:
            what = f"the model uses the {allowed.what} {wrong[1]}"
            raise out_of_range(what, allowed, line, fix="correct the number, or enlarge what is indexed")

    def _check_before(self, index: fx.Node, needed: set[fx.Node], allowed: Range, line: SourceLine | None) -> None:
        """Check integers before each call, or when the state that they depend on is bound."""
        itself = _same_elements(index)
        if itself in self._inputs:
            position = self._inputs.index(itself)
            check = IndexCheck(_described(self._specs[itself]), allowed, line, position)
            self.checks.setdefault((itself, allowed), check)
            return
        state = [node for node, spec in self._specs.items() if node in needed and spec.role is not Role.USER_INPUT]
        source = next((node for node in self._inputs if node in needed), None)
        taken = state if source is None else [*self._inputs, *state]
        check = IndexCheck(
            _described(self._specs[state[0] if source is None else source]),
            allowed,
            line,
            position=None,
            ops=self._computation(index, taken),
            state=tuple(self._specs[node].name for node in state),
            is_of_state=source is None,
        )
        self.checks.setdefault((index, allowed), check)

    def _computation(self, index: fx.Node, taken: list[fx.Node]) -> StepGraph:
        """A graph from these inputs to one index."""
        needed = ancestors([index])
        builder = GraphBuilder()
        for node in taken:  # in this order, whatever they are
            builder.input(replace(self._specs[node], role=Role.USER_INPUT), node)
        for node in self._ops.nodes:
            if node.op == "call_function" and node in needed:
                if node.target is WITHIN:
                    builder.copies[node] = builder.copies[node.args[0]]  # pyright: ignore[reportArgumentType]
                else:
                    builder.copy([node])
        builder.output(OutputSpec("index", OutputRole.USER_OUTPUT), builder.copies[index])
        return builder.build("index")

    def _guard(self, node: fx.Node, index: fx.Node, allowed: Range, line: SourceLine | None) -> None:
        """Let the program tell the worst of some integers, and go on with those that are in range."""
        ops, low, high = self._ops, allowed.low, max(allowed.low, allowed.high)
        with ops.inserting_before(index.next if index.op == "call_function" else self._first_op()):
            safe = insert(ops, index, aten.clamp.default, index, low, high)
            judged = index
            if allowed.ignored is not None:
                is_ignored = insert(ops, index, aten.eq.Scalar, index, allowed.ignored)
                safe = insert(ops, index, aten.where.self, is_ignored, index, safe)
                judged = insert(ops, index, aten.masked_fill.Scalar, index, is_ignored, low)
            judged = insert(ops, index, aten._to_copy.default, judged, dtype=torch.int64)
            least, greatest = (insert(ops, index, op.default, judged) for op in (aten.min, aten.max))
            is_low = insert(ops, index, aten.lt.Scalar, least, low)
            worst = insert(ops, index, aten.where.self, is_low, least, greatest)
        self._guards.append((Guard(line, f"{allowed.what} of {allowed.op} in {allowed}", allowed), worst))
        ends = [low, high, *([] if allowed.ignored is None else [allowed.ignored])]
        self._known[safe] = (min(ends), max(ends))
        if node.target is WITHIN:
            node.replace_all_uses_with(safe)
            return
        if self._is_body:  # where others, such as the counter of a loop, go on with what it is
            node.replace_input_with(index, safe)
            return
        made = set(ancestors([worst, safe])) - ancestors([index])
        index.replace_all_uses_with(safe, delete_user_cb=lambda user: user not in made)
        self._safe[index] = safe

    def _first_op(self) -> fx.Node:
        return next(node for node in self._ops.nodes if node.op != "placeholder")

    def _remove_markers(self) -> None:
        for node in [node for node in self._ops.nodes if node.target is WITHIN]:
            node.replace_all_uses_with(node.args[0])  # pyright: ignore[reportArgumentType]
            self._ops.erase_node(node)

    def guarded_body(self) -> GuardedBody:
        """The body as it is now, without markers, and what its guards find."""
        self._remove_markers()
        return GuardedBody(self._graph, self._guards)

    def guarded_graph(self) -> StepGraph:
        """The graph as it is now, without markers; it returns what its guards have found."""
        ops = self._ops
        self._remove_markers()
        if not self._guards:
            return self._graph
        output = ops.output_node()
        specs, results = list(self._graph.signature.outputs), list[Any](output.args[0])  # pyright: ignore
        found = [node for _, node in self._guards]
        with ops.inserting_before(output):
            guards = insert(ops, found[0], aten.stack.default, found)
            for position, spec in enumerate(specs):
                if spec.role is OutputRole.GUARD:
                    before = insert(ops, found[0], aten._to_copy.default, results[position], dtype=torch.int64)
                    guards = insert(ops, found[0], aten.cat.default, [before, guards])
                    del specs[position], results[position]
                    break
        output.args = ((*results, guards),)
        signature = replace(self._graph.signature, outputs=(*specs, OutputSpec("guards", OutputRole.GUARD)))
        guards_of = (*self._graph.guards, *(guard for guard, _ in self._guards))
        return replace(self._graph, signature=signature, guards=guards_of)


def _unsafe_condition(guard: Guard) -> CompileError:
    return CompileError(
        explain(
            f"the condition of a loop uses an index that may be out of range: {guard.expected}.",
            where=str(guard.line),
            fix="compute it in the body of the loop and carry the result",
        )
    )


def _guarded_body(graph: StepGraph) -> GuardedBody:
    if not _uses_indices(graph):
        return GuardedBody(graph, ())
    return _Bounds(replace(graph, ops=graph.copy_ops()), is_body=True).guarded_body()


def _described(spec: InputSpec) -> str:
    if spec.role is Role.CONSTANT:
        return "a tensor from outside the model"
    return f"{'argument' if spec.role is Role.USER_INPUT else 'buffer'} {spec.name}"


def _same_elements(node: fx.Node) -> fx.Node:
    """The node that holds the same integers, looking through ops that neither drop nor change any."""
    while node.target in _KEEPS_ELEMENTS and not value_of(node.all_input_nodes[0]).is_floating_point():
        node = node.all_input_nodes[0]
    return node
