"""Cut a micro-step into the programs of its sections: forward, recompute and backward, with what they hand over.

In:    a placed graph of one micro-batch: the forward pass of an inference step, or what runs for every micro-batch of
       a training step.
Out:   a graph per part. Values that one part computes and another needs are BOUNDARY outputs and inputs of the same
       name. With recomputation, a section keeps for its backward part only what it was given, what it drew at random,
       what it hands to other sections, and what the user stores; a recompute part computes the rest again.
Keeps: every value; together the parts read and write the same state.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx

from poptorch.compiler.passes.place import without_place
from poptorch.errors import CompileError, explain
from poptorch.executable import Kind, Part, part_name
from poptorch.ir import (
    Direction,
    GraphBuilder,
    InputSpec,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    hint_of,
    note_of,
    value_of,
)
from poptorch.ir.ops import is_random, is_view, memory_owner


def split_stages(graph: StepGraph, sections: int, *, recomputes: bool) -> dict[Part, StepGraph]:
    """The graphs of all parts, in an order in which they could run."""
    cut = _Cut(graph, sections, recomputes=recomputes)
    cut.check_state()
    parts = {part: cut.graph_of(part) for part in cut.parts}
    return {part: found for part, found in parts.items() if found is not None}


class _Cut:
    """Which part every op belongs to, and which values cross from one part to another.

    The rank of a part is its place in the order of all forward and backward parts.
    """

    def __init__(self, graph: StepGraph, sections: int, *, recomputes: bool) -> None:
        self.graph, self._sections = graph, sections
        self._specs = {node: spec for spec, node in graph.inputs}
        self._ops = [node for node in graph.ops.nodes if node.op == "call_function"]
        self._anywhere = without_place(graph)
        self._ranks = self._assign()
        self._names = {node: f"value:{index}" for index, node in enumerate(self._ops)}
        trains = max(self._ranks.values(), default=0) >= sections
        self._recomputed = range(sections - 1) if recomputes and trains else range(0)
        self.parts: list[Part] = [(Kind.FORWARD, section) for section in range(sections)]
        for section in reversed(range(sections)) if trains else ():
            self.parts += [(Kind.RECOMPUTE, section)] if section in self._recomputed else []
            self.parts.append((Kind.BACKWARD, section))

    def _assign(self) -> dict[fx.Node, int]:
        """The rank of each op: never below those of its operands."""
        ranks: dict[fx.Node, int] = {}
        for node in self._ops:
            note = note_of(node)
            section = note.placement.section if note is not None and note.placement is not None else 0
            is_backward = note is not None and note.direction is Direction.BACKWARD
            own = 2 * self._sections - 1 - section if is_backward else section
            if node.target is operator.getitem or is_random(node):  # parts hand over tensors, not tuples of them,
                own = 0  # and draw as early as they can, in the order of forward
            if node in self._anywhere:  # what all sections need is computed before they do
                own = 0
            ranks[node] = max([own, *(ranks[used] for used in node.all_input_nodes if used in ranks)])
        return ranks

    def check_state(self) -> None:
        """Raise if a section reads state that another one writes: micro-batches overtake each other between the two."""
        for spec, node in self.graph.outputs:
            if spec.role is not OutputRole.NEW_VALUE:
                continue
            (source,) = [each for each, own in self._specs.items() if own.name == spec.name]
            readers = {self._ranks[user] for user in source.users if user in self._ranks}
            if readers - {self._ranks.get(node, 0)}:
                raise CompileError(
                    explain(
                        f"one section of the model writes {spec.name}, and another one reads it.",
                        fix="put both into one block, or leave out Options.runStages(True)",
                    )
                )

    def graph_of(self, part: Part) -> StepGraph | None:
        """The graph of a part; None for a recomputation that has nothing to do."""
        kind, section = part
        if kind is Kind.RECOMPUTE:
            wanted = self._wanted(section)
            again = self._recomputed_ops(section, wanted)
            missing = [node for node in wanted if node in again]
            return self._build(part, [node for node in self._ops if node in again], missing, []) if missing else None
        rank = section if kind is Kind.FORWARD else 2 * self._sections - 1 - section
        own = [node for node in self._ops if self._ranks[node] == rank]
        outputs = [(spec, node) for spec, node in self.graph.outputs if self._ranks.get(node, 0) == rank]
        return self._build(part, own, self._handed_on(section, rank, own), outputs)

    def _handed_on(self, section: int, rank: int, own: Sequence[fx.Node]) -> list[fx.Node]:
        """The values that a part gives to others."""
        if rank not in self._recomputed:
            return [node for node in own if self._can_cross(node) and self._is_used_after(node, rank)]
        stored = self._stored(section)
        wanted = self._wanted(section)
        again = self._recomputed_ops(section, wanted)
        read_again = {used for node in again for used in node.all_input_nodes}
        return [
            node for node in own if node in stored and (node in wanted or node in read_again or self._goes_on(node))
        ]

    def _can_cross(self, node: fx.Node) -> bool:
        """Whether a value is a tensor that is not only another view of an input, which each part makes for itself."""
        return isinstance(value_of(node), torch.Tensor) and not self._shows_input(node)

    def _shows_input(self, node: fx.Node) -> bool:
        return is_view(node) and memory_owner(node) in self._specs

    def _is_used_after(self, node: fx.Node, rank: int) -> bool:
        return any(self._ranks.get(user, rank) > rank for user in self._users(node))

    def _users(self, node: fx.Node) -> Iterable[fx.Node]:
        return (user for user in node.users if user.op == "call_function")

    def _goes_on(self, node: fx.Node) -> bool:
        """Whether a later section's forward part takes a value."""
        later = range(self._ranks[node] + 1, self._sections)
        return any(self._ranks[user] in later for user in self._users(node))

    def _wanted(self, section: int) -> list[fx.Node]:
        """The forward values of a section that backward parts read."""
        own = [node for node in self._ops if self._ranks[node] == section and self._can_cross(node)]
        return [n for n in own if any(self._ranks[user] >= self._sections for user in self._users(n))]

    def _stored(self, section: int) -> set[fx.Node]:
        """The forward values of a section that are kept if anybody needs them again."""
        own = [node for node in self._ops if self._ranks[node] == section and self._can_cross(node)]
        kept = {node for node in own if self._goes_on(node) or _is_drawn(node) or _is_checkpoint(node)}
        return kept | self._anywhere.intersection(own)

    def _recomputed_ops(self, section: int, wanted: Collection[fx.Node]) -> set[fx.Node]:
        """The ops that a recomputation runs again: from the wanted values back to stored ones."""
        stored = self._stored(section)
        found: set[fx.Node] = set()
        waiting = [node for node in wanted if node not in stored]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                inside = [n for n in node.all_input_nodes if self._ranks.get(n) == section and n not in stored]
                waiting += [used for used in inside if not self._shows_input(used)]
        return found

    def _build(
        self,
        part: Part,
        own: Sequence[fx.Node],
        handed_on: Sequence[fx.Node],
        outputs: Sequence[tuple[OutputSpec, fx.Node]],
    ) -> StepGraph:
        builder = GraphBuilder()
        inside = set(own)
        for node in own:
            for used in node.all_input_nodes:
                if used not in inside:
                    self._bring(builder, used)
            builder.copy([node])
        for spec, node in outputs:
            if spec.role is OutputRole.NEW_VALUE and builder.node(spec.name) is None:
                source = next(each for each, given in self._specs.items() if given.name == spec.name)
                builder.input(self._specs[source], source)
            self._bring(builder, node)
            builder.output(spec, builder.copies[node])
        for node in handed_on:
            builder.output(OutputSpec(self._names[node], OutputRole.BOUNDARY), builder.copies[node])
        is_guarding = any(spec.role is OutputRole.GUARD for spec, _ in outputs)
        guards = self.graph.guards if is_guarding else ()
        return builder.build(part_name(part), guards=guards, constants=self.graph.constants, graphs=self.graph.graphs)

    def _bring(self, builder: GraphBuilder, node: fx.Node) -> None:
        """Let a part know a value from outside: an input of the step, a view of one, or what another part computes."""
        if node in builder.copies:
            return
        if node in self._specs:
            builder.input(self._specs[node], node)
        elif self._shows_input(node):
            for used in node.all_input_nodes:
                self._bring(builder, used)
            builder.copy([node])
        else:
            builder.input(InputSpec.of(self._names[node], Role.BOUNDARY, value_of(node)), node)


def _is_drawn(node: fx.Node) -> bool:
    """Whether a value is random, or one of the results of an op that draws."""
    return is_random(node.all_input_nodes[0] if node.target is operator.getitem else node)


def _is_checkpoint(node: fx.Node) -> bool:
    """Whether the user wants a value stored rather than recomputed."""
    return hint_of(node, "checkpoint") is True
