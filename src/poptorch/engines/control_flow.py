"""Loops and branches of a graph in the terms of TorchInductor, which generates native loops and branches for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from poptorch.engines.ops import runnable_ops
from poptorch.ir import StepGraph, choose_graph, is_control, repeat_graph, runs_of

hops = torch.ops.higher_order
Tensors = Sequence[torch.Tensor]
Function = Callable[..., Tensors]


def all_nodes(graph: StepGraph) -> Iterator[fx.Node]:
    """The nodes of a graph and of what its loops and branches run."""
    for node in graph.ops.nodes:
        yield node
        if is_control(node):
            for run in runs_of(node):
                yield from all_nodes(graph.graphs[run.graph])


class WithControlFlow(fx.Interpreter):
    """Runs the ops of a graph, and PyTorch's own higher-order ops for its loops and branches."""

    def __init__(self, graph: StepGraph) -> None:
        super().__init__(nn.Module(), graph=runnable_ops(graph))
        self._graphs = graph.graphs

    def run_node(self, n: fx.Node) -> Any:
        if not is_control(n):
            return super().run_node(n)
        bodies = [_body(self._graphs[run.graph]) for run in runs_of(n)]
        args: Any = self.fetch_args_kwargs_from_env(n)[0]
        if n.target is choose_graph:
            return _choose(bodies, args[0], args[2], args[4])
        if n.target is repeat_graph:
            return _repeat(bodies[0], args[1], args[2], args[3])
        return hops.while_loop(_only(bodies[0]), bodies[1], tuple(map(_dense, args[2])), tuple(args[3]))


def _body(graph: StepGraph) -> Function:
    run = WithControlFlow(graph).run

    def body(*tensors: torch.Tensor) -> Tensors:
        return tuple(map(_dense, run(*tensors)))

    return body


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gaps: what a body gives must be laid out as what it takes, and as what another gives.

    That includes the strides of dimensions that have one element or none.
    """
    is_laid_out = tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
    return tensor if is_laid_out else tensor.clone(memory_format=torch.contiguous_format)


def _choose(bodies: Sequence[Function], condition: torch.Tensor, then: Tensors, otherwise: Tensors) -> Tensors:
    operands: list[torch.Tensor] = []
    for tensor in (*then, *otherwise):
        if not any(tensor is known for known in operands):
            operands.append(tensor)

    def taking(body: Function, own: Tensors) -> Function:
        """A branch takes the operands of both, and hands its own to the body."""
        positions = [next(i for i, known in enumerate(operands) if known is tensor) for tensor in own]
        return lambda *tensors: body(*(tensors[position] for position in positions))

    return hops.cond(condition, taking(bodies[0], then), taking(bodies[1], otherwise), tuple(operands))


def _repeat(body: Function, count: int, carried: Tensors, captured: Tensors) -> Tensors:
    start = torch.zeros((), dtype=torch.int64)

    def goes_on(done: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return done < count

    def run(done: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        return done + 1, *body(*tensors)

    return hops.while_loop(goes_on, run, (start, *map(_dense, carried)), tuple(captured))[1:]


def _only(condition: Function) -> Callable[..., torch.Tensor]:
    return lambda *tensors: condition(*tensors)[0]
