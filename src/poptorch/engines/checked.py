"""The checked engine: the eager engine with a look at every result, for `Precision.enableFloatingPointExceptions`.

The first op that leaves the ordinary numbers raises an error with the user's line, before anything is written. It is
found by its operands: NaN and infinities that were there before, such as those of a mask, are passed on silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from poptorch.engines.eager import EagerKernel, eager_graphs, eager_ops
from poptorch.engines.engine import Kernel
from poptorch.engines.host import Observer, unobserved
from poptorch.errors import FloatError, explain
from poptorch.executable import Program
from poptorch.ir import Direction, StepGraph, note_of, runs_of
from poptorch.ir.python import run_graphs

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_DIVISIONS = frozenset({"div", "reciprocal", "remainder", "fmod", "floor_divide"})
_WITH_INNER_RESULTS = frozenset({"ctc_loss"})  # beside the loss it hands logarithms of zero to its backward pass
_WITHOUT_VALUES = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)


@dataclass(frozen=True)
class CheckedEngine:
    name: str = "checked eager"

    def compile(self, programs: Sequence[Program], observe: Observer = unobserved) -> dict[str, Kernel]:
        return {program.name: self._compile(program) for program in programs}

    def _compile(self, program: Program) -> EagerKernel:
        graph = program.graph
        return EagerKernel.of(program, graph, _CheckedOps(eager_ops(graph), eager_graphs(graph)).run)


class _CheckedOps(fx.Interpreter):
    """Runs ops one by one and looks at what each of them makes of its operands."""

    def __init__(self, ops: fx.Graph, graphs: Mapping[str, StepGraph]) -> None:
        super().__init__(nn.Module(), graph=ops)
        self._inner = {name: _CheckedOps(graph.ops, graph.graphs).run for name, graph in graphs.items()}
        self.extra_traceback = False  # our message is the whole message

    def run_node(self, n: fx.Node) -> Any:
        if runs_of(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            own = kwargs.get("generator")
            return run_graphs(n.target, args, self._inner, *([] if own is None else [own]))
        result = super().run_node(n)
        if n.op == "call_function":
            operands = _leaves(self.fetch_args_kwargs_from_env(n))
            problem = find_problem(_name(n), operands, _leaves(result))
            if problem is not None:
                raise _error(n, problem)
        return result


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    map_aggregate(value, found.append)
    return found


def find_problem(op: str, operands: list[Any], results: list[Any]) -> str | None:
    """What is exceptional about an op with these operands and results, if anything is."""
    if op in _COMPARISONS and _any(torch.isnan, operands) and not _asks_what_it_is(operands):
        return "it compares with NaN"
    if op in _DIVISIONS and _any(torch.isinf, operands[:2][-1:]):
        return "it divides by infinity"
    if op in _WITHOUT_VALUES:
        return None
    if op in _WITH_INNER_RESULTS:
        results = results[:1]
    if _any(torch.isnan, results) and not _any(torch.isnan, operands):
        return "its result has NaN, and no operand has"
    if _any(torch.isinf, results) and not _any(torch.isinf, operands):
        return "its result has infinity, and no operand has: it divides by zero or overflows"
    return None


def _asks_what_it_is(operands: list[Any]) -> bool:
    """Whether a comparison is a way to ask for NaN or infinity: with itself, or with an infinite number."""
    first, second = operands[:2]
    return first is second or (isinstance(second, float) and math.isinf(second))


def _any(holds: Callable[[torch.Tensor], torch.Tensor], values: Iterable[Any]) -> bool:
    """Whether something holds for an element of any tensor, or for any Python number."""
    numbers = (torch.as_tensor(value) for value in values if isinstance(value, (float, torch.Tensor)))
    return any(bool(holds(number).any()) for number in numbers)


def _name(node: fx.Node) -> str:
    """The op without the spelling of its overload: `div` for `aten.div.Tensor_mode`."""
    target: Any = node.target
    return target.overloadpacket.__name__ if hasattr(target, "overloadpacket") else target.__name__.strip("_")


def _error(node: fx.Node, problem: str) -> FloatError:
    note = note_of(node)
    direction = Direction.FORWARD if note is None else note.direction
    details = {} if note is None or note.line is None else {"where": str(note.line)}
    return FloatError(
        explain(
            f"floating-point exception in {_name(node)} of the {direction.value} pass: {problem}.",
            **details,
            state="the model and the optimiser are as they were after the last finished update",
            fix="keep the operands in range (clamp, a small constant under a fraction, a loss scale), or leave "
            "Precision.enableFloatingPointExceptions off",
        )
    )
