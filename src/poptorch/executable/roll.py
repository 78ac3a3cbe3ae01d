"""Cut the update of many parameters into one part that they share and one piece each, and find pieces that are alike.

The arithmetic of an update is the same for all parameters of an optimiser. Generated code that repeats it for hundreds
of them takes minutes to compile; code for one piece takes seconds and can be called for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from poptorch.executable.program import Program
from poptorch.ir import InputSpec, OutputRole, OutputSpec, Role, Signature, StepGraph, value_of
from poptorch.ir.ops import as_op

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
    """An update in pieces: the shared part, if there is one, writes `scratch`, then each piece runs on its tensors."""

    shared: Program | None
    shared_sources: tuple[Source, ...]
    scratch: tuple[InputSpec, ...]
    patterns: tuple[Pattern, ...]
    pieces: tuple[Piece, ...]

    def arguments(self, state: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The tensors of each call: of the shared part first, then of every piece."""
        scratch = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in self.scratch]

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
    """The program in pieces, or None if it is not the update of many parameters or has no such pieces."""
    owners = [spec for spec in program.state if spec.role is Role.PARAMETER]
    returns = [spec for spec in program.signature.outputs if spec.role is not OutputRole.NEW_VALUE]
    if len(owners) < _FEWEST_PIECES or returns or program.draws_random_numbers or program.signature.user_inputs:
        return None
    cut = _Cut(program)
    return cut.roll(strides) if cut.is_possible else None


@dataclass
class _Builder:
    """A program in the making, with the source of each of its inputs."""

    name: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    inputs: list[InputSpec] = field(default_factory=list[InputSpec])
    sources: list[Source] = field(default_factory=list[Source])

    def take(self, node: fx.Node | None, spec: InputSpec, source: Source) -> None:
        placeholder = self.graph.placeholder(f"in{len(self.inputs)}")
        if node is not None:
            placeholder.meta = dict(node.meta)
            self.copies[node] = placeholder
        self.inputs.append(spec)
        self.sources.append(source)

    def copy(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)

    def finish(self, results: Mapping[str, fx.Node]) -> Program:
        """A program that writes these values to the inputs of these names."""
        self.graph.output(tuple(self.copies[node] for node in results.values()))
        outputs = tuple(OutputSpec(name, OutputRole.NEW_VALUE) for name in results)
        return Program(StepGraph(self.name, self.graph, Signature(tuple(self.inputs), outputs)))


class _Cut:
    """Which ops of an update belong to which parameter. What is computed from several of them is shared by all."""

    def __init__(self, program: Program) -> None:
        self.program = program
        graph, signature = program.graph, program.signature
        self.specs = dict(zip(graph.placeholders, signature.inputs, strict=True))
        self.positions = {node: index for index, node in enumerate(self.specs)}
        self.parameters = [spec.name for spec in signature.inputs if spec.role is Role.PARAMETER]
        known = frozenset(self.parameters)
        self.owner = {node: spec.owner if spec.owner in known else None for node, spec in self.specs.items()}
        self.ops = [node for node in graph.ops.nodes if node.op == "call_function"]
        for node in self.ops:
            owners = {self.owner[used] for used in node.all_input_nodes} - {None}
            self.owner[node] = owners.pop() if len(owners) == 1 else None
        new_values = zip(signature.outputs, graph.results, strict=True)
        self.results = {spec.name: node for spec, node in new_values}
        self.owned_results = {name: n for name, n in self.results.items() if name.partition(":")[0] in known}

    @property
    def is_possible(self) -> bool:
        """Whether pieces write only what is theirs, and read nothing that the shared part has overwritten."""
        if any(self.owner[node] != name.partition(":")[0] for name, node in self.owned_results.items()):
            return False
        overwritten = {node for node, spec in self.specs.items() if spec.name in self.results and not self.owner[node]}
        crossing = [used for node in self._owned_ops() for used in node.all_input_nodes if not self.owner[used]]
        return all(isinstance(value_of(n), torch.Tensor) for n in crossing) and overwritten.isdisjoint(crossing)

    def roll(self, strides: Mapping[str, tuple[int, ...]]) -> Rolled:
        elements = {node for node in self.ops if self._is_element(node)}
        used = [n for node in self._owned_ops() for n in node.all_input_nodes]
        needed = [n.all_input_nodes[0] if n in elements else n for n in used]
        crossing = list(dict.fromkeys(n for n in needed if n.op != "placeholder" and not self.owner[n]))
        scratch = tuple(_scratch_spec(index, node) for index, node in enumerate(crossing))
        shared, shared_sources = self._shared_part(crossing, scratch)
        patterns: dict[str, int] = {}
        programs: list[Pattern] = []
        pieces: list[Piece] = []
        sources = {node: Source(index, is_shared=True) for index, node in enumerate(crossing)}
        for node in elements:
            vector, _, index = node.args
            if vector in sources:
                sources[node] = Source(sources[vector].position, is_shared=True, element=index)  # pyright: ignore
        for owner in self.parameters:
            pattern, arguments = self._piece(owner, sources, strides)
            key = _key(pattern)
            if key not in patterns:
                patterns[key] = len(programs)
                programs.append(pattern)
            pieces.append(Piece(patterns[key], arguments))
        return Rolled(shared, shared_sources, scratch, tuple(programs), tuple(pieces))

    def _owned_ops(self) -> list[fx.Node]:
        return [node for node in self.ops if self.owner[node]]

    def _is_element(self, node: fx.Node) -> bool:
        """Whether this op only picks a number from a shared vector, so that a piece can be given a view instead."""
        if node.target is not aten.select.int or self.owner[node] or node.args[1] != 0:
            return False
        is_picked = node.all_input_nodes[0].op == "call_function" and value_of(node).dim() == 0
        return is_picked and all(self.owner[user] for user in node.users if user.op == "call_function")

    def _shared_part(
        self, crossing: list[fx.Node], scratch: tuple[InputSpec, ...]
    ) -> tuple[Program | None, tuple[Source, ...]]:
        """Everything that does not belong to one parameter, for example step counts and the norm of all gradients."""
        results = {name: node for name, node in self.results.items() if name not in self.owned_results}
        results.update({spec.name: node for spec, node in zip(scratch, crossing, strict=True)})
        if not results:
            return None, ()
        wanted: set[fx.Node] = set(results.values())
        for node in reversed(self.ops):
            if node in wanted:
                wanted.update(node.all_input_nodes)
        builder = _Builder(f"{self.program.name}-shared")
        for node, spec in self.specs.items():
            if node in wanted or spec.name in results:
                builder.take(node, spec, Source(self.positions[node]))
        for index, spec in enumerate(scratch):
            builder.take(None, spec, Source(index, is_shared=True))
        builder.copy(node for node in self.ops if node in wanted)
        return builder.finish(results), tuple(builder.sources)

    def _piece(
        self, owner: str, shared: Mapping[fx.Node, Source], strides: Mapping[str, tuple[int, ...]]
    ) -> tuple[Pattern, tuple[Source, ...]]:
        """The ops of one parameter as a program in which names are the same whatever the parameter."""
        ops = [node for node in self.ops if self.owner[node] == owner]
        own = [node for node, spec in self.specs.items() if spec.owner == owner]
        outside = dict.fromkeys(used for node in ops for used in node.all_input_nodes if used not in set(ops))
        specs = {
            node: InputSpec(f"own:{i}", spec.role, spec.shape, spec.dtype, strides.get(spec.name, spec.stride))
            for i, node in enumerate(own)
            if (spec := self.specs[node])
        }
        is_flat = _can_be_flat(ops, list(specs.values()), [value_of(n) for n in outside if n not in specs])
        builder = _Builder(f"{self.program.name}-piece")
        for node, spec in specs.items():
            builder.take(node, _flattened(spec) if is_flat else spec, Source(self.positions[node]))
        for node in outside:
            if node not in specs:
                source = shared[node] if node in shared else Source(self.positions[node])
                builder.take(node, InputSpec.of(f"shared:{len(builder.inputs)}", Role.HYPER, value_of(node)), source)
        builder.copy(ops)
        names = {self.specs[node].name: spec.name for node, spec in specs.items()}
        results = {names[name]: node for name, node in self.owned_results.items() if name in names}
        return Pattern(builder.finish(results), is_flat), tuple(builder.sources)


def _scratch_spec(index: int, node: fx.Node) -> InputSpec:
    value: torch.Tensor = value_of(node)
    like = torch.empty(value.shape, device="meta")
    return InputSpec(f"shared:{index}", Role.HYPER, tuple(value.shape), value.dtype, tuple(like.stride()))


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
