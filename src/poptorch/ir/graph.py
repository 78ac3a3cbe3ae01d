"""`StepGraph`: an FX graph of ATen ops with a typed signature, that prints as a small program and can be verified.

Every op node carries a `Note` in its metadata: the phase it belongs to and the line of the user's code it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, cast

import torch
from torch import fx

from poptorch.ir.ops import as_op, is_random
from poptorch.ir.ranges import Range
from poptorch.ir.signature import InputSpec, OutputRole, OutputSpec, Role, Signature, tensor_type
from poptorch.ir.source import SourceLine
from poptorch.ir.values import value_of


class Phase(Enum):
    """Which part of a training step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True)
class Note:
    """What we know about one op beside what it computes."""

    phase: Phase
    line: SourceLine | None = None
    path: str = ""  # of the submodule, for example "encoder.0.fc"
    name: str = ""  # by which users ask for the value, if it is not called after its op
    replica: int = 0  # whose random numbers the op draws, among the replicas that a program runs for


_NOTE = "poptorch"  # key of the Note in Node.meta["custom"], the one entry that every torch transformation keeps


def note_of(node: fx.Node) -> Note | None:
    return cast("Note | None", node.meta.get("custom", {}).get(_NOTE))


def is_update(node: fx.Node) -> bool:
    """Whether an op belongs to the weight update."""
    note = note_of(node)
    return node.op == "call_function" and note is not None and note.phase is Phase.UPDATE


def give_name(node: fx.Node, name: str) -> None:
    """Let users ask for the value of an op that has a note by a name of its own."""
    note = note_of(node)
    assert note is not None
    node.meta["custom"] = {**node.meta["custom"], _NOTE: replace(note, name=name)}


def annotation(note: Note) -> dict[str, Note]:
    """The value to give to `torch.fx.traceback.annotate` so that `note_of` finds `note`."""
    return {_NOTE: note}


@dataclass(frozen=True)
class Guard:
    """What the program relies on: a value of the first batch that later ones reproduce, or integers in a range.

    If no guard has a range, the output of the guards tells for each whether it holds. Otherwise it holds integers: one
    for each that is out of range if any is, and 1 for each value that is reproduced.
    """

    line: SourceLine | None
    expected: str
    allowed: Range | None = None

    @property
    def limits(self) -> tuple[int, int]:
        """Between which integers the output shows that the guard holds."""
        return (1, 1) if self.allowed is None else (self.allowed.low, self.allowed.high)


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A pure program over flat tensors: `ops` computes what `signature` declares.

    The output node returns one value per `signature.outputs`; an output with role NEW_VALUE is the value that the
    input of the same name has afterwards. `guards` describes the elements of the one GUARD output, if there is one.
    `graphs` are those that belong to this one, by the names that its ops call them.
    """

    name: str
    ops: fx.Graph
    signature: Signature
    guards: tuple[Guard, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # values of CONSTANT inputs
    graphs: Mapping[str, StepGraph] = field(default_factory=dict[str, "StepGraph"])
    takes_any_length: bool = False  # whether its vectors may be longer or shorter than the signature says

    @property
    def inputs(self) -> list[tuple[InputSpec, fx.Node]]:
        """Every input with its node."""
        return list(zip(self.signature.inputs, self.placeholders, strict=True))

    @property
    def outputs(self) -> list[tuple[OutputSpec, fx.Node]]:
        """Every output with the node that computes it."""
        return list(zip(self.signature.outputs, self.results, strict=True))

    @property
    def draws_random_numbers(self) -> bool:
        return any(is_random(node) for node in self.ops.nodes if node.op == "call_function")

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.ops.nodes if node.op == "placeholder"]

    @property
    def results(self) -> list[fx.Node]:
        """The nodes that the graph returns, one per output of the signature."""
        return list(self.ops.output_node().args[0])  # pyright: ignore

    def copy_ops(self) -> fx.Graph:
        """A copy of the ops that may be edited; node metadata is shared."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.ops, {}))  # pyright: ignore[reportArgumentType]
        return graph

    def count_ops(self) -> int:
        return sum(node.op == "call_function" for node in self.ops.nodes)

    def __eq__(self, other: object) -> bool:
        """Whether two graphs compute the same by the same ops, which come from the same lines."""
        from poptorch.ir.digest import are_equal  # which needs this class

        return are_equal(self, other) if isinstance(other, StepGraph) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.name, self.signature))

    def __str__(self) -> str:
        return "\n".join(_print(self))


def verify(graph: StepGraph) -> None:
    """Check what every pass must keep; a failure is a mistake of ours, not of the user."""
    for inner in graph.graphs.values():
        verify(inner)
    graph.ops.lint()
    inputs, outputs = graph.signature.inputs, graph.signature.outputs
    assert len(graph.placeholders) == len(inputs), f"{len(graph.placeholders)} placeholders, {len(inputs)} inputs"
    assert len(graph.results) == len(outputs), f"{len(graph.results)} results, {len(outputs)} outputs"
    names = [spec.name for spec in inputs]
    assert len(set(names)) == len(names), f"input names are not unique: {names}"
    roles = [spec.role is Role.USER_INPUT for spec in inputs]
    assert roles == sorted(roles), "state comes first, then the inputs of the user"
    assert graph.signature.written <= set(names), "a new value for an input that does not exist"
    for spec, node in graph.inputs:
        value = value_of(node)
        assert tuple(value.shape) == spec.shape and value.dtype == spec.dtype, f"{spec} is declared, {value} is taken"
    guards = [spec for spec in outputs if spec.role is OutputRole.GUARD]
    assert len(guards) == bool(graph.guards), "one guard output if there are guards, none otherwise"
    for node in graph.ops.nodes:
        if node.target is call_graph:
            _verify_call(graph, node)


def _verify_call(graph: StepGraph, call: fx.Node) -> None:
    name, operands = cast("tuple[str, list[fx.Node]]", call.args)
    assert name in graph.graphs, f"a call of {name}, which does not exist"
    taken = graph.graphs[name].signature.inputs
    assert len(operands) == len(taken), f"{name} takes {len(taken)} tensors, not {len(operands)}"
    for spec, operand in zip(taken, operands, strict=True):
        value = value_of(operand)
        assert value.dtype == spec.dtype and value.dim() == len(spec.shape), f"{spec} is declared, {value} is passed"


def call_graph(name: str, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a node calls that runs another graph on tensors of this one; engines put that graph in its place."""
    raise AssertionError(f"{name} is not a function but a graph")


def called_graphs(ops: fx.Graph) -> set[str]:
    """The names of the graphs that ops run."""
    return {str(node.args[0]) for node in ops.nodes if node.target is call_graph}


def _print(graph: StepGraph) -> Iterator[str]:
    for inner in graph.graphs.values():
        yield from _print(inner)
        yield ""
    names = {node: spec.name for spec, node in graph.inputs}
    yield f"{graph.name}({', '.join(map(str, graph.signature.inputs))}):"
    rows: list[tuple[str, str]] = []
    for node in graph.ops.nodes:
        if node.op == "call_function":
            names[node] = f"%{len(rows)}"
            rows.append((f"  {names[node]}: {_type(node)} = {_call(node, names)}", _origin(node)))
    width = min(max((len(op) for op, _ in rows), default=0), 100)
    for op, origin in rows:
        yield f"{op:<{width}}  {origin}".rstrip()
    for spec, node in graph.outputs:
        yield f"  return {names.get(node, node)} as {spec}"
    for guard in graph.guards:
        yield f"  guard {guard.expected} at {guard.line}"


def _type(node: fx.Node) -> str:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return tensor_type(value.dtype, tuple(value.shape))
    if isinstance(value, (tuple, list)):
        items = cast("tuple[Any, ...]", value)
        parts = (tensor_type(v.dtype, tuple(v.shape)) if isinstance(v, torch.Tensor) else "-" for v in items)
        return f"({', '.join(parts)})"
    return "?"


def _call(node: fx.Node, names: dict[fx.Node, str]) -> str:
    target = node.target
    called = str(target).removesuffix(".default") if as_op(target) is not None else _name(target)
    if target is call_graph:
        name, operands = cast("tuple[str, list[object]]", node.args)
        return f"call {name}({', '.join(_argument(operand, names) for operand in operands)})"
    arguments = [_argument(value, names) for value in node.args]
    arguments += [f"{key}={_argument(value, names)}" for key, value in node.kwargs.items()]
    return f"{called}({', '.join(arguments)})"


def _name(target: str | Callable[..., Any]) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _argument(value: object, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names.get(value, value.name)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(item, names) for item in cast('list[object]', value))}]"
    if isinstance(value, torch.dtype):
        return tensor_type(value, ()).removesuffix("[]")
    return str(value)


def _origin(node: fx.Node) -> str:
    note = note_of(node)
    if note is None:
        return ""
    if note.line is None:
        return note.phase.value
    return f"{note.phase.value:<8}  {note.line.short}  {note.line.text}"
