"""`StepGraph`: an FX graph of ATen ops with a typed signature, that prints as a small program and can be verified.

Every op node carries a `Note` in its metadata: the direction it works in, the line of the user's code it came from, and
the hints that users gave about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from poptorch.ir.control import print_run, runs_of, verify_runs
from poptorch.ir.ops import as_op, is_random
from poptorch.ir.placement import Placement
from poptorch.ir.ranges import Range
from poptorch.ir.signature import InputSpec, OutputRole, OutputSpec, Signature, tensor_type
from poptorch.ir.source import SourceLine
from poptorch.ir.values import value_of


class Direction(Enum):
    """Which way an op works: towards the loss, back from it, or on the weights."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


HintValue = Any  # plain data: a number, a text, or tuples of them
Hint = tuple[str, HintValue]
SCOPE = "scope"  # the kind of hint that names a part of the program, see `names.py`


@dataclass(frozen=True)
class Note:
    """What we know about one op beside what it computes."""

    direction: Direction
    line: SourceLine | None = None
    path: str = ""  # of the submodule, for example "encoder.0.fc"
    name: str = ""  # by which users ask for the value, if it is not called after its op
    hints: tuple[Hint, ...] = ()  # what the user said about it that changes no value, each kind once
    placement: Placement | None = None  # where it runs; None as long as nobody has said so
    replica: int = 0  # whose random numbers the op draws, among the replicas that a program runs for

    def hint(self, kind: str) -> HintValue:
        """What the user said of one kind, or None."""
        return dict(self.hints).get(kind)

    def with_hint(self, kind: str, value: HintValue) -> Note:
        """The same with one hint more, in place of an earlier one of its kind; without any of that kind for None."""
        others = tuple(hint for hint in self.hints if hint[0] != kind)
        return replace(self, hints=others if value is None else (*others, (kind, value)))


_NOTE = "poptorch"  # key of the Note in Node.meta["custom"], the one entry that every torch transformation keeps


def note_of(node: fx.Node) -> Note | None:
    return cast("Note | None", node.meta.get("custom", {}).get(_NOTE))


def new_node(
    graph: fx.Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, kind: Any = None
) -> fx.Node:
    """A node at the insertion point of a graph, with a name that no other node has.

    Arguments come second: PyTorch would search those that come with a new node for symbols, which are not in graphs.
    They are set past `Node.__setattr__`, which would take the node out of the tables of its graph and put it back.
    """
    node = graph.create_node(op, target, name=name, type_expr=kind)
    _set_args(node, args)
    if kwargs:
        _set_kwargs(node, kwargs)
    return node


_set_args: Any = fx.Node.args.fset  # pyright: ignore[reportAttributeAccessIssue]
_set_kwargs: Any = fx.Node.kwargs.fset  # pyright: ignore[reportAttributeAccessIssue]


def copy_node(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """The same op at the end of another graph, on the copies of its operands."""
    args: Any = fx.map_arg(node.args, copies.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, copies.__getitem__) if node.kwargs else {}
    copied = new_node(graph, node.op, node.target, args, kwargs, node.name, node.type)
    copied.meta.update(node.meta)
    return copied


def is_update(node: fx.Node) -> bool:
    """Whether an op belongs to the weight update."""
    note = note_of(node)
    return node.op == "call_function" and note is not None and note.direction is Direction.UPDATE


def give_name(node: fx.Node, name: str) -> None:
    """Let users ask for the value of an op that has a note by a name of its own."""
    note = note_of(node)
    assert note is not None
    give_note(node, replace(note, name=name))


def give_note(node: fx.Node, note: Note) -> None:
    """Replace the note of an op; other nodes that share its metadata keep theirs."""
    node.meta = {**node.meta, "custom": {**node.meta.get("custom", {}), _NOTE: note}}


def hint_of(node: fx.Node, kind: str) -> HintValue:
    """What the user said of one kind about an op, or None."""
    note = note_of(node)
    return None if note is None else note.hint(kind)


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
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.ops.nodes:
            copies[node] = copy_node(graph, node, copies)
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
    roles = [not spec.role.is_state for spec in inputs]
    assert roles == sorted(roles), "state comes first, then the inputs of the user"
    assert graph.signature.written <= set(names), "a new value for an input that does not exist"
    for spec, node in graph.inputs:
        value = value_of(node)
        assert tuple(value.shape) == spec.shape and value.dtype == spec.dtype, f"{spec} is declared, {value} is taken"
    guards = [spec for spec in outputs if spec.role is OutputRole.GUARD]
    assert len(guards) == bool(graph.guards), "one guard output if there are guards, none otherwise"
    verify_runs(graph)


def _print(graph: StepGraph) -> Iterator[str]:
    for inner in graph.graphs.values():
        yield from _print(inner)
        yield ""
    names = {node: spec.name for spec, node in graph.inputs}
    yield f"{graph.name}({', '.join(map(str, graph.signature.inputs))}):"
    rows: list[tuple[str, str]] = []
    has_blocks = any(map(_block, graph.ops.nodes))
    for node in graph.ops.nodes:
        if node.op == "call_function":
            names[node] = f"%{len(rows)}"
            rows.append((f"  {names[node]}: {_type(node)} = {_call(node, names)}", _origin(node, has_blocks)))
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
    if runs_of(node):
        return print_run(node, partial(_argument, names=names))
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
    return repr(value) if isinstance(value, str) and "\n" in value else str(value)


def _block(node: fx.Node) -> str:
    note = note_of(node)
    return "" if note is None or note.placement is None else note.placement.block


def _origin(node: fx.Node, has_blocks: bool) -> str:
    """What a note says about an op; placements only where blocks make a difference."""
    note = note_of(node)
    if note is None:
        return ""
    hints = "".join(f"  {_hint(*hint)}" for hint in note.hints)
    where = f"  {note.placement!s:<13}" if has_blocks and note.placement is not None else ""
    line = "" if note.line is None else f"  {note.line.short}  {note.line.text}"
    return f"{note.direction.value:<8}{where}{hints}{line}".rstrip()


def _hint(kind: str, value: HintValue) -> str:
    if kind == SCOPE:
        value = "/".join(name for _, name in value)
    return f"[{kind}]" if value is True else f"[{kind} {_hint_value(value)}]"


def _hint_value(value: HintValue) -> str:
    """Pairs of a text and a value print as `text=value`."""
    if not isinstance(value, tuple):
        return str(value)
    items = cast("tuple[Any, ...]", value)
    named = all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in items)  # pyright: ignore
    parts = [f"{name}={_hint_value(item)}" for name, item in items] if named else map(_hint_value, items)
    return f"({', '.join(parts)})"
