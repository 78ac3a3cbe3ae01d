"""`StepGraph`: an FX graph of ATen ops with a typed signature, that prints as a small program and can be verified.

Every op node carries a `Note` in its metadata: the phase it belongs to and the line of the user's code it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, cast

import torch
from torch import fx

from poptorch.ir.ops import as_op
from poptorch.ir.signature import OutputRole, Role, Signature, tensor_type
from poptorch.ir.source import SourceLine


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


_NOTE = "poptorch"  # key of the Note in Node.meta["custom"], the one entry that every torch transformation keeps


def note_of(node: fx.Node) -> Note | None:
    return cast("Note | None", node.meta.get("custom", {}).get(_NOTE))


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
    """A value of the first batch that the program relies on: later batches must reproduce it."""

    line: SourceLine | None
    expected: str


@dataclass(frozen=True)
class StepGraph:
    """A pure program over flat tensors: `ops` computes what `signature` declares.

    The output node returns one value per `signature.outputs`; an output with role NEW_VALUE is the value that the
    input of the same name has afterwards. `guards` describes the elements of the one GUARD output, if there is one.
    """

    name: str
    ops: fx.Graph
    signature: Signature
    guards: tuple[Guard, ...] = ()
    draws_random_numbers: bool = False
    constants: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # values of CONSTANT inputs

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

    def __str__(self) -> str:
        return "\n".join(_print(self))


def value_of(node: fx.Node) -> Any:
    """The fake tensor (or tuple of them) that a node computes."""
    return node.meta.get("val")


def verify(graph: StepGraph) -> None:
    """Check what every pass must keep; a failure is a mistake of ours, not of the user."""
    graph.ops.lint()
    inputs, outputs = graph.signature.inputs, graph.signature.outputs
    assert len(graph.placeholders) == len(inputs), f"{len(graph.placeholders)} placeholders, {len(inputs)} inputs"
    assert len(graph.results) == len(outputs), f"{len(graph.results)} results, {len(outputs)} outputs"
    names = [spec.name for spec in inputs]
    assert len(set(names)) == len(names), f"input names are not unique: {names}"
    roles = [spec.role is Role.USER_INPUT for spec in inputs]
    assert roles == sorted(roles), "state comes first, then the inputs of the user"
    assert graph.signature.written <= set(names), "a new value for an input that does not exist"
    for spec, node in zip(inputs, graph.placeholders, strict=True):
        value = value_of(node)
        assert tuple(value.shape) == spec.shape and value.dtype == spec.dtype, f"{spec} is declared, {value} is taken"
    guards = [spec for spec in outputs if spec.role is OutputRole.GUARD]
    assert len(guards) == bool(graph.guards), "one guard output if there are guards, none otherwise"


def _print(graph: StepGraph) -> Iterator[str]:
    names: dict[fx.Node, str] = {
        node: spec.name for node, spec in zip(graph.placeholders, graph.signature.inputs, strict=True)
    }
    yield f"{graph.name}({', '.join(map(str, graph.signature.inputs))}):"
    rows: list[tuple[str, str]] = []
    for node in graph.ops.nodes:
        if node.op == "call_function":
            names[node] = f"%{len(rows)}"
            rows.append((f"  {names[node]}: {_type(node)} = {_call(node, names)}", _origin(node)))
    width = min(max((len(op) for op, _ in rows), default=0), 100)
    for op, origin in rows:
        yield f"{op:<{width}}  {origin}".rstrip()
    for node, spec in zip(graph.results, graph.signature.outputs, strict=True):
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
