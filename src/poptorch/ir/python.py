"""A graph as a Python function.

The function names everything that is not a plain integer or text: ops, numbers, types, generators. So it does not
matter whether an argument prints as Python that means the same (NaN does not, nor the sign of a complex zero), or
whether an overload is called like a keyword.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from poptorch.ir.control import call_graph, choose_graph, repeat_graph, repeat_while, runs_of
from poptorch.ir.graph import StepGraph
from poptorch.ir.ops import memory_owner

_PLAIN = (bool, int, str, type(None))
Tensors = Sequence[torch.Tensor]
Function = Callable[..., Tensors]


def as_function(
    ops: fx.Graph, name: str = "graph", graphs: Mapping[str, StepGraph] | None = None
) -> Callable[..., Any]:
    """What computes the output of a graph from its inputs; values are freed after their last use.

    The name stands in tracebacks; `graphs` are those that ops call.
    """
    called = {key: as_function(graph.ops, key, graph.graphs) for key, graph in (graphs or {}).items()}
    printer = _Printer(list(ops.nodes), called)
    lines = [f"def run({', '.join(printer.inputs)}):", *printer.lines]
    exec(compile("\n    ".join(lines), f"<{name}>", "exec"), printer.named)
    return printer.named.pop("run")


def run_graphs(
    target: Any, arguments: Sequence[Any], functions: Mapping[str, Function], *generator: torch.Generator
) -> Tensors:
    """What a node that runs graphs gives, for its arguments with tensors in place of nodes, and functions for graphs.

    They are given the generator after their other arguments, if there is one.
    """
    given = (functions[each] if isinstance(each, str) else each for each in arguments)
    return _RUNNERS[target](*given, *generator)


class _Printer:
    """The lines of a function, and the objects that they name."""

    def __init__(self, nodes: Sequence[fx.Node], called: Mapping[str, Callable[..., Any]]) -> None:
        self._called = called
        self.named: dict[str, Any] = {}
        self.inputs: list[str] = []
        self.lines: list[str] = []
        self._values = {node: f"v{index}" for index, node in enumerate(nodes)}
        last_used = _last_uses(nodes)
        for node in nodes:
            if node.op == "placeholder":
                self.inputs.append(self._values[node])
            elif node.op == "output":
                self.lines.append(f"return {self._print(node.args[0])}")
            else:
                assert node.op == "call_function", f"{node.op} {node.target} is not part of a program"
                freed = "".join(f"{self._values[value]} = " for value in last_used.get(node, ()))
                self.lines.append(f"{self._values[node]} = {self._call(node)}" + (f"; {freed}None" if freed else ""))

    def _call(self, node: fx.Node) -> str:
        if runs_of(node):
            return self._run(node)
        arguments = list(map(self._print, node.args))
        if (owner := _shown_input(node)) is not None:
            position = _OFFSETS[node.target]
            arguments[position] += f" + {self._values[owner]}.storage_offset()"
        named = {name: self._print(value) for name, value in node.kwargs.items()}
        arguments += [f"{name}={value}" for name, value in named.items() if not keyword.iskeyword(name)]
        arguments += [f"**{{{name!r}: {value}}}" for name, value in named.items() if keyword.iskeyword(name)]
        return f"{self._name(node.target)}({', '.join(arguments)})"

    def _run(self, node: fx.Node) -> str:
        """A call of other graphs; a node that was given a generator hands it to them as their last argument."""
        called = iter([self._name(self._called[run.graph]) for run in runs_of(node)])
        arguments = [next(called) if isinstance(value, str) else self._print(value) for value in node.args]
        own = node.kwargs.get("generator")
        generator = "" if own is None else f", {self._print(own)}"
        return f"{self._name(_RUNNERS[node.target])}({', '.join(arguments)}{generator})"

    def _print(self, value: object) -> str:
        if isinstance(value, fx.Node):
            return self._values[value]
        if not _holds_nodes(value):
            return repr(value) if type(value) in _PLAIN else self._name(value)
        if isinstance(value, slice):
            cut = cast("slice[object, object, object]", value)
            return f"slice({self._print(cut.start)}, {self._print(cut.stop)}, {self._print(cut.step)})"
        if isinstance(value, dict):
            items = cast("dict[str, object]", value).items()
            return f"{{{', '.join(f'{key!r}: {self._print(item)}' for key, item in items)}}}"
        items = "".join(f"{self._print(item)}, " for item in cast("list[object]", value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"

    def _name(self, value: object) -> str:
        name = f"o{len(self.named)}"
        self.named[name] = value
        return name


def _call(function: Function, operands: Tensors) -> Tensors:
    return function(*operands)


def _repeat(body: Function, count: int, carried: Tensors, captured: Tensors, *generator: torch.Generator) -> Tensors:
    for _ in range(count):
        carried = body(*carried, *captured, *generator)
    return carried


def _choose(
    condition: torch.Tensor,
    then: Function,
    then_operands: Tensors,
    otherwise: Function,
    else_operands: Tensors,
    *generator: torch.Generator,
) -> Tensors:
    if condition:
        return then(*then_operands, *generator)
    return otherwise(*else_operands, *generator)


def _repeat_while(
    holds: Function, body: Function, carried: Tensors, captured: Tensors, *generator: torch.Generator
) -> Tensors:
    carried = [tensor.clone() for tensor in carried]  # which are the results if the body never runs
    while holds(*carried, *captured, *generator)[0]:
        carried = body(*carried, *captured, *generator)
    return carried


_RUNNERS: dict[Any, Callable[..., Tensors]] = {
    call_graph: _call,
    repeat_graph: _repeat,
    choose_graph: _choose,
    repeat_while: _repeat_while,
}
_OFFSETS: dict[Any, int] = {  # which argument says where in memory a value starts
    torch.ops.aten.as_strided.default: 3,
    torch.ops.aten.as_strided_copy.default: 3,
    torch.ops.aten.as_strided_scatter.default: 4,
}


def _shown_input(node: fx.Node) -> fx.Node | None:
    """The input whose memory an op shows from an offset on.

    PyTorch counts from the start of the memory, graphs from the first element of the input: that may be a part of
    something larger, and another part in every call.
    """
    position = _OFFSETS.get(node.target)
    if position is None or node.args[position : position + 1] in ((), (None,)):
        return None
    owner = memory_owner(node.all_input_nodes[0])
    return owner if owner.op == "placeholder" else None


def _holds_nodes(value: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return bool(found)


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nobody needs after it."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        owner = _shown_input(node)
        for value in (*node.all_input_nodes, *([] if owner is None else [owner]), node):
            if value not in seen:
                seen.add(value)
                found.setdefault(node, []).append(value)
    return found
