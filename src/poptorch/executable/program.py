"""A program: one graph that an engine turns into something that runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn

from poptorch.ir import Guard, InputSpec, OutputRole, OutputSpec, Signature, StepGraph

aten = torch.ops.aten


@dataclass(frozen=True)
class Program:
    """One graph, and what an engine and its caller need to know about its inputs and outputs.

    A program is called with its state (bound once) followed by the user's tensors. It writes new values of its
    inputs in place and returns the rest: the user's outputs and, if there are guards, one boolean vector.
    """

    graph: StepGraph
    reads_fixed_state: bool = False  # nobody but the program itself changes its state while it is bound

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def signature(self) -> Signature:
        return self.graph.signature

    @property
    def state(self) -> tuple[InputSpec, ...]:
        return self.signature.state

    @property
    def returned(self) -> tuple[OutputSpec, ...]:
        handed_out = (OutputRole.USER_OUTPUT, OutputRole.ANCHOR, OutputRole.GUARD)
        return tuple(spec for spec in self.signature.outputs if spec.role in handed_out)

    @property
    def guards(self) -> tuple[Guard, ...]:
        return self.graph.guards

    @property
    def draws_random_numbers(self) -> bool:
        return self.graph.draws_random_numbers

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        return self.graph.constants

    @property
    def written_state(self) -> tuple[str, ...]:
        """The names of the state that the program changes, in the order of its inputs."""
        return tuple(spec.name for spec in self.state if spec.name in self.signature.written)

    @property
    def written_positions(self) -> tuple[int, ...]:
        """For each new value that the graph computes, the position of the input that it goes to."""
        positions = {spec.name: index for index, spec in enumerate(self.signature.inputs)}
        return tuple(positions[spec.name] for spec in self.signature.outputs if spec.role is OutputRole.NEW_VALUE)

    @property
    def fixed_positions(self) -> tuple[int, ...]:
        """The positions of the inputs that are the same in every call."""
        if not self.reads_fixed_state:
            return ()
        return tuple(index for index, spec in enumerate(self.state) if spec.name not in self.signature.written)

    def functional_ops(self) -> fx.GraphModule:
        """The ops with the returned values first and the new values of `written_positions` after them."""
        ops = self.graph.copy_ops()
        output = ops.output_node()
        results: list[fx.Node] = list(output.args[0])  # pyright: ignore
        pairs = list(zip(self.signature.outputs, results, strict=True))
        returned = [node for spec, node in pairs if spec.role is not OutputRole.NEW_VALUE]
        written = [node for spec, node in pairs if spec.role is OutputRole.NEW_VALUE]
        output.args = (tuple(returned + written),)
        for node in ops.nodes:  # kernels may lay out their results otherwise than the trace foretold
            if node.target in (aten.view.default, aten._unsafe_view.default):
                node.target = aten.reshape.default
        return fx.GraphModule(nn.Module(), ops)


def in_place(ops: fx.GraphModule, written_positions: tuple[int, ...]) -> fx.GraphModule:
    """End functional ops with one `copy_` per new value, which native compilers turn into in-place writes."""
    graph = ops.graph
    output = graph.output_node()
    results: list[fx.Node] = list(output.args[0])  # pyright: ignore
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    count = len(results) - len(written_positions)
    with graph.inserting_before(output):
        for position, value in zip(written_positions, results[count:], strict=True):
            target = placeholders[position]
            is_scattered = value.target is aten.index_put.default and list(value.users) == [output]
            new = value.args[0] if is_scattered else value
            if new is not target:
                graph.call_function(aten.copy_.default, (target, new)).meta["val"] = target.meta["val"]
            if is_scattered:  # into the new value itself, not into a copy of it
                graph.call_function(aten.index_put_.default, (target, *value.args[1:])).meta["val"] = target.meta["val"]
    output.args = (tuple(results[:count]),)
    graph.eliminate_dead_code()
    ops.recompile()
    return ops
