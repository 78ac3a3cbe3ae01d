"""Where programs get their random numbers: from a generator that they are given, never from that of the host.

An op that was given a generator by the user goes on using that.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, fx

from poptorch.ir import is_control, note_of
from poptorch.ir.ops import is_random

aten = torch.ops.aten
Op = torch._ops.OpOverload
FROM = "from"  # an overload that is a keyword of Python

# Ops that overwrite all of their first operand, of which only size and layout matter: what does it in place.
FILLS: dict[Any, Op] = {
    aten.bernoulli.p: aten.bernoulli_.float,
    aten.uniform.default: aten.uniform_.default,
    aten.normal_functional.default: aten.normal_.default,
    aten.exponential.default: aten.exponential_.default,
    aten.geometric.default: aten.geometric_.default,
    aten.cauchy.default: aten.cauchy_.default,
    aten.log_normal.default: aten.log_normal_.default,
    aten.random.default: aten.random_.default,
    aten.random.to: aten.random_.to,
    getattr(aten.random, FROM): getattr(aten.random_, FROM),
}


def give_generators(ops: fx.Graph) -> None:
    """Let every op that draws take the generator of its replica; the list of them becomes the last input."""
    inputs = [node for node in ops.nodes if node.op == "placeholder"]
    with ops.inserting_after(inputs[-1]) if inputs else ops.inserting_before(next(iter(ops.nodes))):
        generators = ops.placeholder("generators")
    for node in list(ops.nodes):
        if draws(node) and node.kwargs.get("generator") is None:
            if is_control(node):  # which hands them to the graphs that it runs
                node.kwargs = {**node.kwargs, "generator": generators}
                continue
            with ops.inserting_before(node):
                own = ops.call_function(operator.getitem, (generators, replica_of(node)))
            node.target = taking_generator(node.target)
            node.kwargs = {**node.kwargs, "generator": own}


def replica_of(node: fx.Node) -> int:
    """Whose random numbers an op draws."""
    note = note_of(node)
    return 0 if note is None else note.replica


def draws(node: fx.Node) -> bool:
    return node.op == "call_function" and is_random(node)


def _filling(fill: Op) -> Callable[..., Tensor]:
    """Draws in the order of the operand's memory, as the in-place op of the user's code does."""

    def draw(like: Tensor, *args: Any, generator: Generator) -> Tensor:
        return fill(torch.empty_like(like), *args, generator=generator)

    return draw


def taking_generator(op: Any) -> Callable[..., Any]:
    """What draws as an op does, but takes a generator."""
    fill = FILLS.get(op)
    return _filling(fill) if fill else overload_with_generator(op) or _borrowing(op)


def overload_with_generator(op: Any) -> Op | None:
    """The overload of an op that takes a generator, and everything else as the op does."""
    names = [argument.name for argument in op._schema.arguments]
    if "generator" in names:
        return op
    for overload in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, overload)
        arguments = [argument.name for argument in other._schema.arguments]
        if "generator" in arguments and [name for name in arguments if name != "generator"] == names:
            return other
    return None


_HOST = threading.Lock()


def _borrowing(op: Op) -> Callable[..., Any]:
    """For an op that draws from the host's generator and from no other: lend the host the state of the device's."""

    def draw(*args: Any, generator: Generator, **kwargs: Any) -> Any:
        with _HOST:
            host = torch.get_rng_state()
            torch.set_rng_state(generator.get_state())
            try:
                return op(*args, **kwargs)
            finally:
                generator.set_state(torch.get_rng_state())
                torch.set_rng_state(host)

    return draw
