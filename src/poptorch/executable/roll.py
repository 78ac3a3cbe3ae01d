"""Cut the update of many parameters into one part that they share and one piece each, and find pieces that are alike.

The arithmetic of an update is the same for all parameters of an optimiser. Generated code that repeats it for hundreds
of them takes minutes to compile; code for one piece takes seconds and can be called for each. In a step that does
everything at once, what computes the gradients belongs to the shared part, which hands them over in scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from poptorch.executable.program import Program
from poptorch.ir import InputSpec, OutputRole, OutputSpec, Phase, Role, Signature, StepGraph, note_of, value_of
from poptorch.ir.ops import as_op, is_random

aten = torch.ops.aten
_FEWEST_PIECES = 16  # below this one program for all of them compiles fast enough, and needs one call
_MANY_ELEMENTS = 2**13  # from here on the code for a piece may use several threads
_ELEMENTWISE = frozenset({aten._to_copy.default, aten.zeros_like.default, aten.clone.default})
_KEEPS_LAYOUT: tuple[dict[str, object], ...] = ({}, {"memory_format": torch.preserve_format})


@dataclass(frozen=True)
class Source:
    """Where an argument comes from: the state of the program or the shared part, and there an element or all of it."""

    position: int
    is_shared: bool = False
    element: int | None = None


@dataclass(frozen=True)
class Pattern:
    """A program for pieces that are alike; if `is_flat`, their tensors have one dimension of any length."""

    program: Program
    is_flat: bool

    @property
    def length(self) -> int | None:
        return max(math.prod(spec.shape) for spec in self.program.state) if self.is_flat else None


@dataclass(frozen=True)
class Piece:
    """One call of a pattern."""

    pattern: int
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Rolled:
    """An update in pieces: the shared part, if there is one, writes `scratch`, then each piece runs on its tensors.

    The shared part takes the user's tensors, after the others, and returns what the whole returns.
    """

    shared: Program | None
    shared_sources: tuple[Source, ...]
    scratch: tuple[InputSpec, ...]
    patterns: tuple[Pattern, ...]
    pieces: tuple[Piece, ...]

    def arguments(self, state: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The tensors of each call: of the shared part first, then of every piece."""
        scratch = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype) for spec in self.scratch]

        def find(source: Source, *, is_flat: bool = False) -> torch.Tensor:
            tensor = (scratch if source.is_shared else state)[source.position]
            if source.element is not None:
                return tensor[source.element]
            return tensor.as_strided((tensor.numel(),), (1,)) if is_flat and tensor.dim() else tensor

        found = [] if self.shared is None else [[find(source) for source in self.shared_sources]]
        for piece in self.pieces:
            is_flat = self.patterns[piece.pattern].is_flat
            found.append([find(source, is_flat=is_flat) for source in piece.sources])
        return found


def roll(program: Program, strides: Mapping[str, tuple[int, ...]]) -> Rolled | None:
    """The program in pieces, or None if it does not update many parameters or has no such pieces."""
    cut = _Cut(program)
    return cut.roll(strides) if len(cut.parameters) >= _FEWEST_PIECES and cut.is_possible else None


@dataclass
class _Builder:
    """A program in the making, with the source of each of its inputs; the user's have none."""

    origin: StepGraph
    name: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    inputs: list[InputSpec] = field(default_factory=list[InputSpec])
    sources: list[Source] = field(default_factory=list[Source])

    def take(self, node: fx.Node | None, spec: InputSpec, source: Source | None) -> None:
        placeholder = self.graph.placeholder(f"in{len(self.inputs)}")
        if node is not None:
            placeholder.meta = dict(node.meta)
            self.copies[node] = placeholder
        self.inputs.append(spec)
        if source is not None:
            self.sources.append(source)

    def copy(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)

    def finish(self, results: Mapping[str, fx.Node], returned: Sequence[tuple[OutputSpec, fx.Node]] = ()) -> Program:
        """A program that writes these values to the inputs of these names, and returns others."""
        written = [(OutputSpec(name, OutputRole.NEW_VALUE), node) for name, node in results.items()]
        pairs = [*returned, *written]
        self.graph.output(tuple(self.copies[node] for _, node in pairs))
        signature = Signature(tuple(self.inputs), tuple(spec for spec, _ in pairs))
        return Program(
            replace(self.origin, name=f"{self.origin.name}-{self.name}", ops=self.graph, signature=signature)
        )


class _Cut:
    """Which ops of an update belong to which parameter. What is computed from several of them is shared by all."""

    def __init__(self, program: Program) -> None:
        self.program = program
        graph, signature = program.graph, program.signature
        self.specs = dict(zip(graph.placeholders, signature.inputs, strict=True))
        self.positions = {node: index for index, node in enumerate(self.specs)}
        pairs = list(zip(signature.outputs, graph.results, strict=True))
        self.returned = [(spec, node) for spec, node in pairs if spec.role is not OutputRole.NEW_VALUE]
        self.results = {spec.name: node for spec, node in pairs if spec.role is OutputRole.NEW_VALUE}
        updated = {name for name, node in self.results.items() if _is_update(node)}
        self.parameters = {s.name: s for s in signature.inputs if s.role is Role.PARAMETER and s.name in updated}
        self.owner = {node: s.owner if s.owner in self.parameters else None for node, s in self.specs.items()}
        self.ops = [node for node in graph.ops.nodes if node.op == "call_function"]
        for node in self.ops:
            owners = {self.owner[used] for used in node.all_input_nodes} - {None}
            self.owner[node] = owners.pop() if _is_update(node) and len(owners) == 1 else None
        for node in reversed(self.ops):
            if _is_update(node) and not self.owner[node]:
                self.owner[node] = self._only_user(node)
        self.owned_results = {n: node for n, node in self.results.items() if n.partition(":")[0] in self.parameters}

    def _only_user(self, node: fx.Node) -> str | None:
        """The parameter that alone needs this op: it takes a gradient a step further, but nothing of the parameter."""
        owners = {self.owner.get(user) for user in node.users}  # None for one that is returned
        owner = owners.pop() if len(owners) == 1 else None
        if owner is None or not (shape := self.parameters[owner].shape):
            return None
        return owner if getattr(value_of(node), "shape", None) == shape else None

    @property
    def is_possible(self) -> bool:
        """Whether pieces write only what is theirs, and read nothing that the shared part overwrites or is given."""
        if any(self.owner[node] != name.partition(":")[0] for name, node in self.owned_results.items()):
            return False
        if any(self.owner[node] for _, node in self.returned) or any(is_random(node) for node in self._owned_ops()):
            return False
        foreign = {
            node
            for node, spec in self.specs.items()
            if spec.role is Role.USER_INPUT or (spec.name in self.results and not self.owner[node])
        }
        crossing = [used for node in self._owned_ops() for used in node.all_input_nodes if not self.owner[used]]
        return all(isinstance(value_of(n), torch.Tensor) for n in crossing) and foreign.isdisjoint(crossing)

    def roll(self, strides: Mapping[str, tuple[int, ...]]) -> Rolled:
        elements = {node for node in self.ops if self._is_element(node)}
        used = [n for node in self._owned_ops() for n in node.all_input_nodes]
        needed = [n.all_input_nodes[0] if n in elements else n for n in used]
        crossing = list(dict.fromkeys(n for n in needed if n.op != "placeholder" and not self.owner[n]))
        scratch = {node: self._scratch_spec(index, node, strides) for index, node in enumerate(crossing)}
        shared, shared_sources = self._shared_part(scratch)
        patterns: dict[str, int] = {}
        programs: list[Pattern] = []
        pieces: list[Piece] = []
        sources = {node: Source(index, is_shared=True) for index, node in enumerate(crossing)}
        for node in elements:
            vector, _, index = node.args
            if vector in sources:
                sources[node] = Source(sources[vector].position, is_shared=True, element=index)  # pyright: ignore
        for owner in self.parameters:
            pattern, arguments = self._piece(owner, scratch, sources, strides)
            key = _key(pattern)
            if key not in patterns:
                patterns[key] = len(programs)
                programs.append(pattern)
            pieces.append(Piece(patterns[key], arguments))
        return Rolled(shared, shared_sources, tuple(scratch.values()), tuple(programs), tuple(pieces))

    def _scratch_spec(self, index: int, node: fx.Node, strides: Mapping[str, tuple[int, ...]]) -> InputSpec:
        """Where the shared part puts a value: a gradient in the layout of its parameter, anything else without gaps."""
        value: torch.Tensor = value_of(node)
        owners = {owner for user in node.users if (owner := self.owner[user])}
        owner = self.parameters[owners.pop()] if len(owners) == 1 else None
        if owner is not None and owner.shape == value.shape:
            stride = strides.get(owner.name, owner.stride)
            return InputSpec(f"{owner.name}:shared:{index}", Role.ACCUMULATOR, owner.shape, value.dtype, stride)
        like = torch.empty(value.shape, device="meta")
        return InputSpec(f"shared:{index}", Role.HYPER, tuple(value.shape), value.dtype, tuple(like.stride()))

    def _owned_ops(self) -> list[fx.Node]:
        return [node for node in self.ops if self.owner[node]]

    def _is_element(self, node: fx.Node) -> bool:
        """Whether this op only picks a number from a shared vector, so that a piece can be given a view instead."""
        if node.target is not aten.select.int or self.owner[node] or node.args[1] != 0:
            return False
        is_picked = node.all_input_nodes[0].op == "call_function" and value_of(node).dim() == 0
        return is_picked and all(self.owner[user] for user in node.users if user.op == "call_function")

    def _shared_part(self, scratch: Mapping[fx.Node, InputSpec]) -> tuple[Program | None, tuple[Source, ...]]:
        """What does not belong to one parameter: step counts, the norm of all gradients, in a step the gradients."""
        results = {name: node for name, node in self.results.items() if name not in self.owned_results}
        results.update({spec.name: node for node, spec in scratch.items()})
        if not results and not self.returned:
            return None, ()
        wanted = {*results.values(), *(node for _, node in self.returned)}
        for node in reversed(self.ops):
            if node in wanted:
                wanted.update(node.all_input_nodes)
        builder = _Builder(self.program.graph, "shared")
        of_user = [node for node, spec in self.specs.items() if spec.role is Role.USER_INPUT]
        for node, spec in self.specs.items():
            if node not in of_user and (node in wanted or spec.name in results):
                builder.take(node, spec, Source(self.positions[node]))
        for index, spec in enumerate(scratch.values()):
            builder.take(None, spec, Source(index, is_shared=True))
        for node in of_user:
            builder.take(node, self.specs[node], None)
        builder.copy(node for node in self.ops if node in wanted)
        return builder.finish(results, self.returned), tuple(builder.sources)

    def _piece(
        self,
        owner: str,
        scratch: Mapping[fx.Node, InputSpec],
        shared: Mapping[fx.Node, Source],
        strides: Mapping[str, tuple[int, ...]],
    ) -> tuple[Pattern, tuple[Source, ...]]:
        """The ops of one parameter as a program in which names are the same whatever the parameter."""
        ops = [node for node in self.ops if self.owner[node] == owner]
        own = {node: spec for node, spec in self.specs.items() if spec.owner == owner and self.owner[node]}
        outside = dict.fromkeys(used for node in ops for used in node.all_input_nodes if used not in set(ops))
        own.update({node: spec for node in outside if (spec := scratch.get(node)) and spec.owner == owner})
        specs = {
            node: InputSpec(f"own:{i}", spec.role, spec.shape, spec.dtype, strides.get(spec.name, spec.stride))
            for i, (node, spec) in enumerate(own.items())
        }
        is_flat = _can_be_flat(ops, list(specs.values()), [value_of(n) for n in outside if n not in specs])
        builder = _Builder(self.program.graph, "piece")

        def source(node: fx.Node) -> Source:
            return shared[node] if node in shared else Source(self.positions[node])

        for node, spec in specs.items():
            builder.take(node, _flattened(spec) if is_flat else spec, source(node))
        for node in outside:
            if node not in specs:
                spec = InputSpec.of(f"shared:{len(builder.inputs)}", Role.HYPER, value_of(node))
                builder.take(node, spec, source(node))
        builder.copy(ops)
        names = {spec.name: specs[node].name for node, spec in own.items()}
        results = {names[name]: node for name, node in self.owned_results.items() if name in names}
        return Pattern(builder.finish(results), is_flat), tuple(builder.sources)


def _is_update(node: fx.Node) -> bool:
    note = note_of(node)
    return note is not None and note.phase is Phase.UPDATE


def _can_be_flat(ops: list[fx.Node], own: list[InputSpec], shared: list[torch.Tensor]) -> bool:
    """Whether each element is computed from the elements at the same place alone, in memory without gaps."""
    layouts = {(spec.shape, spec.stride) for spec in own if spec.shape}
    if len(layouts) != 1 or any(tensor.dim() for tensor in shared):
        return False
    shape, stride = layouts.pop()
    numbers = sorted(zip(stride, shape, strict=True))
    is_dense = all(
        step == math.prod(size for _, size in numbers[:i]) for i, (step, size) in enumerate(numbers) if size > 1
    )
    return is_dense and math.prod(shape) > 0 and all(_is_elementwise(node) for node in ops)


def _is_elementwise(node: fx.Node) -> bool:
    if node.target in _ELEMENTWISE:
        return {name: value for name, value in node.kwargs.items() if name != "dtype"} in _KEEPS_LAYOUT
    op = as_op(node.target)
    return op is not None and torch.Tag.pointwise in op.tags


def _flattened(spec: InputSpec) -> InputSpec:
    if not spec.shape:
        return spec
    return InputSpec(spec.name, spec.role, (math.prod(spec.shape),), spec.dtype, (1,))


def _key(pattern: Pattern) -> str:
    """The same for two patterns if one can stand for the other."""
    program = pattern.program
    length = pattern.length
    inputs = [
        (spec.dtype, "many" if length >= _MANY_ELEMENTS else "few") if length is not None and spec.shape else spec
        for spec in program.state
    ]
    numbers = {node: index for index, node in enumerate(program.graph.ops.nodes)}
    ops = [(str(n.target), fx.map_arg((n.args, n.kwargs), numbers.__getitem__)) for n in numbers]  # pyright: ignore
    return repr((inputs, ops, [spec.name for spec in program.signature.outputs]))
