"""Nodes that run other graphs: once, as one of two, or again and again.

Such a node calls one of the functions below, which only describe what happens: engines put the graphs, which belong to
the graph of the node and are named in its arguments, in their place. A graph that is run takes all of its tensors as
operands; what it computes has memory of its own, so no result of a node shows the memory of an operand.

Loops carry tensors: the results of one run are the first operands of the next. They also take tensors that stay the
same, which come after those. A node with `draws=True` runs a graph that draws random numbers, new ones in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx

from poptorch.ir.signature import tensor_type
from poptorch.ir.values import value_of

if TYPE_CHECKING:
    from poptorch.ir.graph import StepGraph

Tensors = Sequence[torch.Tensor]


def call_graph(name: str, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run a graph."""
    raise _not_a_function(name)


def repeat_graph(
    name: str, count: int, carried: Tensors, captured: Tensors, *, draws: bool = False
) -> tuple[torch.Tensor, ...]:
    """Run a graph `count` times, at least once; the results are those of the last run."""
    raise _not_a_function(name)


def choose_graph(
    condition: torch.Tensor,
    then_name: str,
    then_operands: Tensors,
    else_name: str,
    else_operands: Tensors,
    *,
    draws: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Run one of two graphs, which give results of the same types."""
    raise _not_a_function(then_name)


def repeat_while(
    condition_name: str, body_name: str, carried: Tensors, captured: Tensors, *, draws: bool = False
) -> tuple[torch.Tensor, ...]:
    """Run a graph as long as another one, which takes the same operands, gives True; perhaps never."""
    raise _not_a_function(body_name)


def _not_a_function(name: str) -> AssertionError:
    return AssertionError(f"{name} is not a function but a graph")


_CONTROL = (repeat_graph, choose_graph, repeat_while)
_LOOPS = (repeat_graph, repeat_while)


@dataclass(frozen=True)
class Run:
    """A graph that a node runs, by its name, and what it is given."""

    graph: str
    operands: tuple[fx.Node, ...]


def is_control(node: fx.Node) -> bool:
    """Whether a node runs other graphs depending on values, or more than once."""
    return node.target in _CONTROL


def draws_inside(node: fx.Node) -> bool:
    """Whether a node runs a graph that draws random numbers."""
    return is_control(node) and node.kwargs.get("draws") is True


def runs_of(node: fx.Node) -> tuple[Run, ...]:
    """The graphs that a node may run."""
    arguments: Any = node.args
    if node.target is call_graph:
        name, operands = arguments
        return (Run(name, tuple(operands)),)
    if node.target is repeat_graph:
        name, _, carried, captured = arguments
        return (Run(name, (*carried, *captured)),)
    if node.target is choose_graph:
        _, then_name, then_operands, else_name, else_operands = arguments
        return Run(then_name, tuple(then_operands)), Run(else_name, tuple(else_operands))
    if node.target is repeat_while:
        condition, body, carried, captured = arguments
        return Run(condition, (*carried, *captured)), Run(body, (*carried, *captured))
    return ()


def called_graphs(ops: fx.Graph) -> set[str]:
    """The names of the graphs that ops run."""
    return {run.graph for node in ops.nodes for run in runs_of(node)}


def verify_runs(graph: StepGraph) -> None:
    """Check that the graphs that ops run exist, and take and give what they should."""
    for node in graph.ops.nodes:
        for run in runs_of(node):
            assert run.graph in graph.graphs, f"a run of {run.graph}, which does not exist"
            _verify_operands(graph.graphs[run.graph], run.operands, exactly=is_control(node))
        if is_control(node):
            _verify_results(graph, node)


def _verify_operands(inner: StepGraph, operands: Sequence[fx.Node], *, exactly: bool) -> None:
    taken = inner.signature.inputs
    assert len(operands) == len(taken), f"{inner.name} takes {len(taken)} tensors, not {len(operands)}"
    for spec, operand in zip(taken, operands, strict=True):
        value = value_of(operand)
        assert value.dtype == spec.dtype and value.dim() == len(spec.shape), f"{spec} is declared, {value} is passed"
        assert not exactly or tuple(value.shape) == spec.shape, f"{spec} is declared, {value} is passed"


def _verify_results(graph: StepGraph, node: fx.Node) -> None:
    """What one run gives must be what the next one takes, and both branches must give the same."""
    inner = [graph.graphs[run.graph] for run in runs_of(node)]
    wanted = _types([value_of(result) for result in inner[-1].results])
    assert draws_inside(node) == any(each.draws_random_numbers for each in inner), f"{node}: a wrong note on draws"
    if node.target in _LOOPS:
        carried = cast("list[fx.Node]", node.args[2])
        assert _types([value_of(each) for each in carried]) == wanted, f"{inner[-1].name} does not give what it takes"
    conditions = [value_of(result) for result in inner[0].results]
    if node.target is choose_graph:
        assert _types(conditions) == wanted, f"{inner[0].name} and {inner[1].name} give different types"
        conditions = [value_of(cast("fx.Node", node.args[0]))]
    if node.target is not repeat_graph:
        assert _types(conditions) == ["bool[]"], f"{node}: a condition is one truth value"
    assert _types(value_of(node)) == wanted, f"{node} does not give what its graph does"


def _types(values: Sequence[torch.Tensor]) -> list[str]:
    return [tensor_type(value.dtype, tuple(value.shape)) for value in values]


def print_run(node: fx.Node, shown: Any) -> str:
    """A node that runs graphs, as a small program shows it; `shown` prints operands."""
    arguments: Any = node.args

    def listed(operands: Sequence[object]) -> str:
        return ", ".join(map(shown, operands))

    if node.target is call_graph:
        return f"call {arguments[0]}({listed(arguments[1])})"
    if node.target is choose_graph:
        condition, then_name, then_operands, else_name, else_operands = arguments
        branches = f"{then_name}({listed(then_operands)}) else {else_name}({listed(else_operands)})"
        return f"if {shown(condition)} then {branches}"
    first, second, carried, captured = arguments
    tensors = listed(carried) + (f"; {listed(captured)}" if captured else "")
    if node.target is repeat_graph:
        return f"repeat {second} times {first}({tensors})"
    return f"while {first} do {second}({tensors})"
