"""Record the ATen ops that run as an FX graph.

PyTorch's `make_fx` does this for programs of every kind: with symbolic sizes, nested graphs, modules as inputs and
in-place ops. Ours have known sizes and are functional, so each op needs one node and nothing else, in a third of the
time. The recorder takes the place of PyTorch's own recording mode, between functionalisation and fake tensors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from poptorch.capture.private import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    ProxyTensor,
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    auto_functionalized,
    auto_functionalized_v2,
    disable_current_modes,
    fx_traceback,
)
from poptorch.capture.shapes import Results, Shapes
from poptorch.capture.source import current_user_line
from poptorch.errors import CompileError, explain
from poptorch.ir import GraphBuilder, InputSpec, Role, StepGraph, note_of, runs_of
from poptorch.ir.graph import new_node
from poptorch.ir.ops import ancestors, depends_on_inputs

aten = torch.ops.aten
Op = OpOverload
_KNOWN_TYPES = frozenset({torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor})
_PROCESSOR = torch.device("cpu")
_NOT_COMPUTING = frozenset({"prim", "profiler"})  # ops that ask for the device of a tensor, or mark a stretch of time


class ValuesNeeded(Exception):
    """The trace without values cannot go on: somebody wants to know the value or the size of a tensor."""


@dataclass(eq=False)
class Level:
    """A graph that is being recorded: that of the step, or one that belongs to the body of a loop or a branch."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    constants: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    constant_nodes: dict[int, fx.Node] = field(default_factory=dict)  # by the id of a tensor in `constants`
    captured: dict[fx.Node, tuple[fx.Node, torch.Tensor]] = field(default_factory=dict)
    graphs: dict[str, StepGraph] = field(default_factory=dict)  # that its ops run
    remakes: Level | None = None  # a body that was recorded before, whose values this one computes again
    remade: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def capture(self, outer: fx.Node, tensor: torch.Tensor) -> fx.Node:
        """The input that stands for a tensor which the graph around this one computes."""
        if outer not in self.captured:
            first_op = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
            with nullcontext() if first_op is None else self.graph.inserting_before(first_op):
                node = self.graph.placeholder(f"captured{len(self.captured)}")
            node.meta = {"val": outer.meta["val"]}
            self.captured[outer] = (node, tensor)
        return self.captured[outer][0]


class Recorder(ProxyTorchDispatchMode):
    """Adds every op that runs to `graph`; a tensor that comes from elsewhere is one of its `constants`.

    While the body of a loop or a branch is recorded, `graph` is that of the body.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        tracer = PythonKeyTracer()  # where PyTorch looks for the graph and for the node of a tensor
        super().__init__(tracer, "real")
        self.levels = [Level()]
        self.bodies = 0  # how many loops and choices were recorded
        self._fake = fake
        self.shapes = Shapes(fake)
        self._custom: dict[str, Any] | None = None  # annotations of the op that runs, if they are known
        tracer.graph = self.graph

    @property
    def graph(self) -> fx.Graph:
        return self.levels[-1].graph

    @property
    def constants(self) -> dict[fx.Node, torch.Tensor]:
        return self.levels[-1].constants

    @property
    def graphs(self) -> dict[str, StepGraph]:
        """The graphs that ops of the current one run."""
        return self.levels[-1].graphs

    @contextmanager
    def body(self, remakes: Level | None = None) -> Iterator[Level]:
        """Ops inside go to a graph of their own. What they take from those around it becomes an input of it.

        What they take from a body that was recorded before, they compute again.
        """
        self.levels.append(Level(remakes=remakes))
        self.tracer.graph = self.graph
        try:
            yield self.levels[-1]
        finally:
            self.levels.pop()
            self.tracer.graph = self.graph

    @contextmanager
    def at_depth(self, depth: int) -> Iterator[None]:
        """Ops inside go to the graph at a depth, 1 for the outermost."""
        before, self.levels = self.levels, self.levels[:depth]
        self.tracer.graph = self.graph
        try:
            yield
        finally:
            self.levels = before
            self.tracer.graph = self.graph

    def add_input(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """A new input of the current graph, and what stands for it."""
        node = self.graph.placeholder(name)
        self._describe(node, tensor)
        return node

    def add_node(self, target: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """A node that has not run anything; `result` is what stands for what it will compute."""
        self._describe(self.graph.call_function(target, args, kwargs), result)

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """The node of the current graph that computes a tensor."""
        return self.argument(tensor)

    def record(self, function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> None:
        """Record a function from end to end: its inputs become those of the graph, and its results too."""
        for index, tensor in enumerate(inputs):
            self.add_input(f"in{index}", tensor)
        with _no_autocast_cache(), self:
            results = function(*inputs)
        self.graph.output([self.argument(result) for result in results])

    def add_constants(self, builder: GraphBuilder, first: int = 0) -> dict[str, torch.Tensor]:
        """Make the constants inputs of a graph that ops are copied to; gives their values. They count from `first`."""
        values: dict[str, torch.Tensor] = {}
        for index, (node, tensor) in enumerate(self.constants.items(), start=first):
            if node.users:
                spec = InputSpec.of(f"constant:{index}", Role.CONSTANT, tensor)
                values[spec.name] = tensor
                builder.input(spec, node)
        return values

    def __torch_dispatch__(
        self, func: Op, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _KNOWN_TYPES.issuperset(types):
            return NotImplemented  # a tensor class of the user's, which knows what to do
        if func.namespace in _NOT_COMPUTING:
            return func(*args, **kwargs)
        if func is aten.lift_fresh.default:
            func = aten.lift_fresh_copy.default  # what follows must not change the constant
        if func is aten._efficientzerotensor.default:
            func = aten.zeros.default  # of the derivatives of what is constant; native code needs its memory
        if torch.Tag.data_dependent_output in func.tags:
            return self._read(func, args, kwargs, self.argument(args), self.argument(kwargs))
        return self.compute(func, args, kwargs)

    def compute(self, func: Op | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and record it."""
        args, kwargs = generator_by_name(func, args, kwargs)
        node_args, node_kwargs = self.argument(args), self.argument(kwargs)  # before anything is changed
        result = self.shapes.compute(func, args, kwargs)
        self._describe(self._new_node(func, node_args, node_kwargs), result, self._custom)
        return result

    def add(
        self, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], known: Results, custom: dict[str, Any]
    ) -> Any:
        """Record an op whose results are known, and give them."""
        node = self._new_node(func, self.argument(args), self.argument(kwargs))
        result = self.shapes.make(known, args)
        self._describe(node, result, custom)
        return result

    @contextmanager
    def annotating(self, custom: dict[str, Any]) -> Iterator[None]:
        """The op that is recorded inside has these annotations."""
        self._custom = custom
        try:
            yield
        finally:
            self._custom = None

    def _new_node(self, func: Op | HigherOrderOperator, args: Any, kwargs: Any) -> fx.Node:
        return new_node(self.graph, "call_function", func, args, kwargs, _name(func))

    def argument(self, value: Any) -> Any:
        """An argument of an op as an argument of its node."""
        if isinstance(value, torch.Tensor):
            known = self.tracer.tensor_tracker.get(value)
            return self._constant(value) if known is None else self._here(known.proxy.node, value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.argument, value))
        if isinstance(value, dict):
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise ValuesNeeded("a size depends on the values of tensors")
        return value

    def _here(self, node: fx.Node, tensor: torch.Tensor, depth: int = -1) -> fx.Node:
        """The node of the current graph (or of that at another depth) for one of this graph or of one around it."""
        level = self.levels[depth]
        if node.graph is level.graph:
            return node
        if level.remakes is not None and node.graph is level.remakes.graph:
            return self._remake(node, level.remakes, depth)
        if len(self.levels) + depth == 0:
            raise CompileError(_left_body(node))
        return level.capture(self._here(node, tensor, depth - 1), tensor)

    def _remake(self, node: fx.Node, before: Level, depth: int) -> fx.Node:
        """Compute a value of a body that was recorded before in the body at a depth."""
        level, needed = self.levels[depth], ancestors([node])
        taken = {inner: (outer, tensor) for outer, (inner, tensor) in before.captured.items()}
        for each in before.graph.nodes:
            if each not in needed or each in level.remade:
                continue
            if each in taken:
                outer, tensor = taken[each]
                level.remade[each] = level.capture(self._here(outer, tensor, depth - 1), tensor)
            else:
                assert each.op == "call_function", f"{each.op} {each} cannot be computed again"
                level.remade[each] = level.graph.node_copy(each, level.remade.__getitem__)
                level.graphs.update((run.graph, before.graphs[run.graph]) for run in runs_of(each))
        return level.remade[node]

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        known = self.levels[-1].constant_nodes
        if id(tensor) not in known:
            if isinstance(tensor, FakeTensor):
                raise RuntimeError("a tensor without a value comes from outside the trace")
            node = self.graph.create_node("get_attr", f"constant{len(self.constants)}")
            node.meta["val"] = self._described(tensor)
            self.constants[node] = tensor
            known[id(tensor)] = node
        return known[id(tensor)]

    def _describe(self, node: fx.Node, result: Any, custom: dict[str, Any] | None = None) -> None:
        """Note on a node what it computes and what is known about it, and its items as nodes of their own."""
        custom = _annotations() if custom is None else custom
        node.meta.update(custom=custom, val=self._described(result))
        if isinstance(result, torch.Tensor):
            self.tracer.tensor_tracker[result] = ProxyTensor(fx.Proxy(node, self.tracer), None)
        elif isinstance(result, (list, tuple)):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    self._describe(self.graph.call_function(operator.getitem, (node, index)), item, dict(custom))

    def _described(self, value: Any) -> Any:
        """A value without its numbers."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._described, value))
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        if value.layout is not torch.strided:
            return None
        if value.is_meta:  # what stands for a tensor of the processor where nobody asks for its device
            return FakeTensor(self._fake, value, _PROCESSOR)
        with self._fake:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def _read(
        self, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], node_args: Any, node_kwargs: dict[str, Any]
    ) -> Any:
        """Python wants to know a value: it can be computed if it depends on constants only."""
        nodes: list[fx.Node] = []
        fx.map_arg((node_args, node_kwargs), nodes.append)
        if any(map(depends_on_inputs, nodes)):
            return func(*args, **kwargs)
        needed, values = ancestors(nodes), dict(self.constants)
        with disable_current_modes():
            for node in self.graph.nodes:
                if node in needed and node not in values:
                    values[node] = node.target(*_known(node.args, values), **_known(node.kwargs, values))
            return func(*_known(node_args, values), **_known(node_kwargs, values))


def _left_body(node: fx.Node) -> str:
    note = note_of(node)
    return explain(
        "a tensor that was computed in the body of a loop or in a branch is used outside of it, where it does not "
        "exist: the body may run many times or not at all.",
        where=str(current_user_line()),
        computed=str(None if note is None else note.line),
        fix="return it from the body",
    )


def generator_by_name(
    func: Op | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op, in which a generator is always given by name."""
    if not args or not isinstance(args[-1], (torch.Generator, type(None))) or not isinstance(func, Op):
        return args, kwargs
    if func._schema.arguments[len(args) - 1].name != "generator":
        return args, kwargs
    return args[:-1], {**kwargs, "generator": args[-1]}


def _record_calls_of(operator: HigherOrderOperator) -> None:
    """Let a recorder see an operator that PyTorch keeps from ordinary modes."""

    @operator.py_impl(Recorder)
    def record(recorder: Recorder, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        return recorder.compute(operator, args, kwargs)


_record_calls_of(auto_functionalized)  # what becomes of a user's op that changes its arguments
_record_calls_of(auto_functionalized_v2)


def _known(arguments: Any, values: dict[fx.Node, Any]) -> Any:
    return fx.map_arg(arguments, values.__getitem__)


def _annotations() -> dict[str, Any]:
    """What is known about the op that runs now; PyTorch replays a view on behalf of the node that it came from."""
    replayed = fx_traceback.get_current_replay_node()
    current = fx_traceback.get_current_meta() if replayed is None else replayed.meta
    return dict(current.get("custom", {}))


@functools.cache
def _name(func: Op | HigherOrderOperator) -> str:
    packet = func.overloadpacket if isinstance(func, Op) else func
    return fx.Graph()._target_to_str(packet.__name__)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Autocasting casts a weight once and remembers the result; a graph must see where each one comes from."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
