"""Record the bodies of loops and branches as graphs of their own.

A body is traced once, on stand-ins for its operands that have no values. Tensors of the enclosing code that it uses are
taken from there as further operands. What it writes to its own operands counts inside only, because they are passed by
value; a write to any other tensor from outside is refused, with the line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from poptorch.capture.context import current_intercept
from poptorch.capture.private import (
    FunctionalTensor,
    disable_current_modes,
    dispatch_modes,
    from_fun,
    function_modes,
    fx_traceback,
    get_proxy_mode,
    to_fun,
)
from poptorch.capture.proxies import node_of, origin_of
from poptorch.capture.recorder import Level, Recorder
from poptorch.capture.source import current_user_line
from poptorch.capture.watch import Watch
from poptorch.errors import CompileError, explain
from poptorch.ir import (
    GraphBuilder,
    InputSpec,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    annotation,
    choose_graph,
    describe,
    fake_mode,
    note_of,
    repeat_graph,
    repeat_while,
    tensor_type,
    value_of,
)
from poptorch.ir.ops import ancestors, is_random, is_view
from poptorch.ir.python import as_function, run_graphs

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Body:
    """What runs in a loop or a branch: a function of tensors that returns a list of them, and what users call it."""

    function: Callable[..., Tensors]
    what: str
    may_write: bool = True  # to its inputs, which are passed by value
    remakes: Level | None = None  # a body that was recorded before, and of whose values this one uses some


@dataclass(frozen=True)
class Outcome:
    """What a loop or a choice gives, what its bodies take from outside, and whether they draw random numbers."""

    results: list[torch.Tensor]
    outside: list[torch.Tensor]
    draws: bool
    levels: tuple[Level, ...] = ()  # of the bodies


def repeat(count: int, body: Body, inputs: Tensors) -> Outcome:
    """Run a body `count` times, first on the inputs and then on its own results."""
    if count == 0:
        return Outcome([torch.clone(tensor) for tensor in inputs], [], draws=False)
    recording = Recording()
    carried = recording.operands(inputs)
    traced = recording.trace(body, carried)
    _require_what_is_carried(traced, carried)
    (name,) = recording.new_names("loop")
    graphs = [traced.build(name, traced.captured)]
    return recording.add(repeat_graph, (name, count, carried, list(traced.captured)), graphs)


def repeat_as_long(condition: Body, body: Body, inputs: Tensors) -> Outcome:
    """Run a body on its own results as long as a condition on them holds."""
    recording = Recording()
    carried = recording.operands(inputs)
    holds, traced = recording.trace(condition, carried), recording.trace(body, carried)
    _require_condition(holds)
    _require_what_is_carried(traced, carried)
    names = recording.new_names("condition", "loop")
    captured = {**holds.captured, **traced.captured}
    graphs = [each.build(name, captured) for name, each in zip(names, (holds, traced), strict=True)]
    return recording.add(repeat_while, (*names, carried, list(captured)), graphs)


def choose(
    condition: torch.Tensor,
    then: Body,
    then_inputs: Tensors,
    otherwise: Body,
    else_inputs: Tensors,
    *,
    reshapes: bool = False,
) -> Outcome:
    """Run one of two bodies; the results of the first may get the shapes of those of the second."""
    recording = Recording()
    (flag,) = recording.operands([truth_value(condition)])
    then_operands, else_operands = recording.operands(then_inputs), recording.operands(else_inputs)
    other = recording.trace(otherwise, else_operands)
    one = recording.trace(_reshaping(then, other) if reshapes else then, then_operands)
    _require_same_types(one, other)
    names = recording.new_names("then", "else")
    graphs = [each.build(name, each.captured) for name, each in zip(names, (one, other), strict=True)]
    branches = ((names[0], [*then_operands, *one.captured]), (names[1], [*else_operands, *other.captured]))
    return recording.add(choose_graph, (flag, *branches[0], *branches[1]), graphs)


def truth_value(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with one element as one truth value."""
    tensor = tensor if tensor.dtype is torch.bool else tensor != 0
    return tensor.reshape(()) if tensor.dim() else tensor


@dataclass(frozen=True)
class Place:
    """Where in the trace something is recorded: in the step, or in a certain body."""

    recorder: Recorder
    depth: int

    @classmethod
    def now(cls) -> Place:
        recorder = get_proxy_mode()
        assert isinstance(recorder, Recorder)
        return cls(recorder, len(recorder.levels))

    def is_outside(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was computed around the body."""
        node = node_of(tensor) if isinstance(tensor, FunctionalTensor) else None
        inside = self.recorder.levels[self.depth - 1 :]
        return node is not None and all(node.graph is not level.graph for level in inside)

    def recording(self) -> AbstractContextManager[None]:
        """Ops belong here, although a body further inside may be recorded now."""
        return self.recorder.at_depth(self.depth)


class Recording:
    """A node in the making that runs bodies; it knows the trace that is going on."""

    def __init__(self) -> None:
        self._recorder = Place.now().recorder
        self._watch = next(mode for mode in dispatch_modes() if isinstance(mode, Watch))
        self._values: dict[fx.Node, torch.Tensor] = {}
        self._outside: list[torch.Tensor] = []
        self._levels: tuple[Level, ...] = ()

    def operands(self, tensors: Tensors) -> list[fx.Node]:
        """The nodes of tensors that are passed to a body, each laid out without gaps."""
        found: list[fx.Node] = []
        for tensor in tensors:
            inside = tensor if isinstance(tensor, FunctionalTensor) else torch.clone(tensor)
            plain: Any = from_fun(inside.detach().contiguous())
            found.append(self._recorder.node(plain))
            self._values[found[-1]] = plain
        return found

    def trace(self, body: Body, operands: Sequence[fx.Node]) -> Traced:
        """Record what a body computes from stand-ins for operands."""
        specs = [InputSpec.of(f"input{i}", Role.USER_INPUT, value_of(node)) for i, node in enumerate(operands)]
        outside = _Outside(self._recorder)
        with self._recorder.body(body.remakes) as level, self._watch.inside(outside), fake_mode(), _seeing_functions():
            stand_ins: list[Any] = []
            for spec in specs:
                with disable_current_modes():
                    tensor = describe(spec)
                self._recorder.add_input(spec.name, tensor)
                stand_ins.append(to_fun(tensor))
            inputs = list(level.graph.nodes)
            results = _with_own_memory(body.function(*stand_ins))
            outside.refuse_writes(body)
            _refuse_writes_to_inputs(body, stand_ins, inputs)
            nodes = [self._recorder.node(from_fun(result)) for result in results]  # pyright: ignore
        self._take_constants(level)
        live = ancestors([*nodes, *filter(is_random, level.graph.nodes)])
        captured = {outer: node for outer, (node, _) in level.captured.items() if node in live}
        self._values.update((outer, level.captured[outer][1]) for outer in captured)
        self._outside += [t for t in outside.tensors if all(t is not known for known in self._outside)]
        self._levels += (level,)
        return Traced(body, level, inputs, specs, captured, nodes, live)

    def _take_constants(self, level: Level) -> None:
        """Let the graph around a body hold its constants."""
        for node, tensor in level.constants.items():
            level.captured.setdefault(self._recorder.node(tensor), (node, tensor))

    def new_names(self, *kinds: str) -> list[str]:
        """Names for graphs that no other graph of the trace has."""
        self._recorder.bodies += 1
        return [f"{kind}{self._recorder.bodies - 1}" for kind in kinds]

    def add(self, target: Callable[..., Any], args: Any, graphs: Sequence[StepGraph]) -> Outcome:
        """Add the node; gives its results."""
        named = {graph.name: graph for graph in graphs}
        self._recorder.graphs.update(named)
        draws = any(graph.draws_random_numbers for graph in graphs)
        with disable_current_modes():
            if self._watch.has_values:
                functions = {name: as_function(graph.ops, name, graph.graphs) for name, graph in named.items()}
                results = tuple(run_graphs(target, fx.map_arg(args, self._values.__getitem__), functions))
            else:
                values = [InputSpec.of("", Role.USER_INPUT, value_of(result)) for result in graphs[-1].results]
                results = tuple(map(describe, values))
        with fx_traceback.annotate(annotation(self._watch.note())):
            self._recorder.add_node(target, args, {"draws": True} if draws else {}, results)
        given: list[Any] = [to_fun(result) for result in results]
        return Outcome(given, self._outside, draws, self._levels)


@dataclass(frozen=True)
class Traced:
    """A body that was traced: its graph, what it takes from outside by the nodes there, and what it gives."""

    body: Body
    level: Level
    inputs: list[fx.Node]
    specs: list[InputSpec]
    captured: dict[fx.Node, fx.Node]
    results: list[fx.Node]
    live: set[fx.Node]

    def build(self, name: str, captured: Iterable[fx.Node]) -> StepGraph:
        """The graph of the body, which takes its operands and then these nodes of the graph around it."""
        with disable_current_modes():  # nothing of this is part of the trace
            return self._build(name, captured)

    def _build(self, name: str, captured: Iterable[fx.Node]) -> StepGraph:
        builder = GraphBuilder()
        builder.inputs(zip(self.specs, self.inputs, strict=True))
        for index, outer in enumerate(captured):
            spec = InputSpec.of(f"captured{index}", Role.USER_INPUT, value_of(outer))
            builder.input(spec, self.captured.get(outer))
        builder.copy(node for node in self.level.graph.nodes if node in self.live)
        for index, result in enumerate(self.results):
            builder.output(OutputSpec(f"result{index}", OutputRole.USER_OUTPUT), builder.copies[result])
        return builder.build(name, graphs=self.level.graphs)

    @property
    def types(self) -> list[str]:
        return _types(self.results)


class _Outside:
    """The tensors that a body takes from the code around it, and the nodes that compute them there."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._depth = recorder, len(recorder.levels)
        self._known: dict[int, tuple[torch.Tensor, fx.Node]] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor, _ in self._known.values()]

    def notice(self, values: Sequence[Any]) -> None:
        """Remember what comes from outside among the operands of an op."""
        inner = [level.graph for level in self._recorder.levels[self._depth :]]
        for value in values:
            if isinstance(value, FunctionalTensor) and id(value) not in self._known:
                node = origin_of(value)
                if node is not None and all(node.graph is not graph for graph in inner):
                    self._known[id(value)] = (value, node)

    def refuse_writes(self, body: Body) -> None:
        """Raise if the body has written to a tensor from outside."""
        for tensor, node in self._known.values():
            now = origin_of(tensor)
            if now is not None and now is not node:
                note = note_of(now)
                raise CompileError(
                    explain(
                        f"the body of {body.what} writes to a tensor of shape {list(tensor.shape)} from outside, which "
                        "is not passed to it.",
                        where=str(current_user_line() if note is None else note.line),
                        fix="pass the tensor as an input, return its new value, and write that to it afterwards",
                    )
                )


def _refuse_writes_to_inputs(body: Body, stand_ins: Tensors, inputs: Sequence[fx.Node]) -> None:
    for stand_in, node in zip(stand_ins, inputs, strict=True):
        if not body.may_write and origin_of(stand_in) is not node:
            note = note_of(origin_of(stand_in) or node)
            raise CompileError(
                explain(
                    f"the body of {body.what} writes to one of its inputs, of shape {list(stand_in.shape)}.",
                    where=str(current_user_line() if note is None else note.line),
                    fix="clone() it before, and return its new value",
                )
            )


def _seeing_functions() -> Any:
    """The mode that sees torch functions, which PyTorch switches off while it handles one such as `torch.cond`."""
    mode = current_intercept()
    return nullcontext() if mode is None or mode in function_modes() else mode


def _with_own_memory(results: Tensors) -> list[torch.Tensor]:
    """Results without gaps that neither share memory with each other nor with what the body was given."""
    separate: list[torch.Tensor] = []
    owners: set[fx.Node | None] = {None}
    for result in results:
        node = node_of(result) if isinstance(result, FunctionalTensor) else None
        owner = None if node is None else _owner(node)
        is_given = owner is None or owner.op != "call_function" or owner.graph is not get_proxy_mode().graph  # pyright: ignore
        if is_given or owner in owners or not result.is_contiguous():
            result = torch.clone(result, memory_format=torch.contiguous_format)
        owners.add(owner)
        separate.append(result)
    return separate


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory a node shows; a view may be one of several that an op gives."""
    while True:
        source: Any = node.args[0] if node.target is operator.getitem else None
        if source is not None and is_view(source):
            node = source
        elif is_view(node):
            node = node.all_input_nodes[0]
        else:
            return node


def _types(nodes: Sequence[fx.Node]) -> list[str]:
    return [tensor_type(value_of(node).dtype, tuple(value_of(node).shape)) for node in nodes]


def _reshaping(body: Body, like: Traced) -> Body:
    """The same body, whose results get the shapes of those of another where they have as many elements."""

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        results = list(body.function(*inputs))
        for index, (result, node) in enumerate(zip(results, like.results, strict=False)):
            shape = value_of(node).shape
            if result.shape != shape and len(shape) and result.numel() == shape.numel():
                results[index] = result.reshape(shape)
        return results

    return Body(run, body.what)


def _require_what_is_carried(traced: Traced, carried: Sequence[fx.Node]) -> None:
    if traced.types != _types(carried):
        raise CompileError(
            explain(
                f"the body of {traced.body.what} returns {', '.join(traced.types) or 'nothing'}, but it takes "
                f"{', '.join(_types(carried)) or 'nothing'}: what it returns is what it takes the next time.",
                where=str(current_user_line()),
                fix="return as many tensors as the body takes, of the same shapes and types",
            )
        )


def _require_condition(traced: Traced) -> None:
    if traced.types != ["bool[]"]:
        raise CompileError(
            explain(
                f"the condition of {traced.body.what} gives {', '.join(traced.types) or 'nothing'}.",
                where=str(current_user_line()),
                fix="return one truth value: a tensor of type torch.bool without dimensions",
            )
        )


def _require_same_types(one: Traced, other: Traced) -> None:
    if one.types != other.types:
        raise CompileError(
            explain(
                f"the branches of {one.body.what} return different tensors: {', '.join(one.types) or 'nothing'} if the "
                f"condition is True, and {', '.join(other.types) or 'nothing'} otherwise.",
                where=str(current_user_line()),
                fix="return as many tensors from both, of the same shapes and types",
            )
        )
