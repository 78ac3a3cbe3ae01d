"""Cut the update of all weights into one for each process, where the weights are.

What belongs to one process is computed there. A value that processes need of another one, such as the norm of a
gradient, is computed there before the update and told to all; what is made of several of those, all compute alike. So
is what belongs to no parameter, such as counters of steps, of which every process has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from poptorch.ir import GraphBuilder, InputSpec, OutputRole, OutputSpec, Role, StepGraph, value_of
from poptorch.ir.ops import ancestors


@dataclass(frozen=True)
class ProcessUpdate:
    """What one process runs: the values that it tells the others, and then its update; None if there is nothing."""

    told: StepGraph | None
    update: StepGraph | None


def split_by_process(update: StepGraph, homes: Mapping[str, int], processes: int) -> list[ProcessUpdate]:
    """The part of each process in an update, by `homes`, the process of each parameter."""
    return _Split(update, homes, processes).parts()


class _Split:
    def __init__(self, update: StepGraph, homes: Mapping[str, int], processes: int) -> None:
        self._update, self._homes, self._processes = update, homes, processes
        self._specs = {node: spec for spec, node in update.inputs}
        self._owners = {spec.name: spec.owner for spec in update.signature.inputs}
        self._touched = self._touches()
        needed = {node for process in range(processes) for node in self._foreign(process)}
        self._told = {node: f"met:{i}" for i, node in enumerate(n for n in update.ops.nodes if n in needed)}

    def parts(self) -> list[ProcessUpdate]:
        return [ProcessUpdate(self._tell(process), self._own(process)) for process in range(self._processes)]

    def _touches(self) -> dict[fx.Node, frozenset[int]]:
        """For each value, the processes whose parameters, gradients or state it is computed from."""
        found: dict[fx.Node, frozenset[int]] = {}
        for node in self._update.ops.nodes:
            if node in self._specs:
                home = self._homes.get(self._specs[node].owner)
                found[node] = frozenset() if home is None else frozenset({home})
            else:
                found[node] = frozenset[int]().union(*(found[used] for used in node.all_input_nodes))
        return found

    def _outputs(self, process: int) -> list[tuple[OutputSpec, fx.Node]]:
        """What a process writes: what belongs to its parameters, and what belongs to none."""
        pairs = self._update.outputs
        return [(spec, node) for spec, node in pairs if self._homes.get(self._owners[spec.name], process) == process]

    def _is_foreign(self, node: fx.Node, process: int) -> bool:
        """Whether a value is computed from what another process has, and from nothing else."""
        touched = self._touched[node]
        return len(touched) == 1 and process not in touched

    def _foreign(self, process: int) -> set[fx.Node]:
        """The values of other processes that an update needs."""
        edge = {node for node in self._touched if self._is_foreign(node, process)}
        return edge & ancestors((node for _, node in self._outputs(process)), stop=edge)

    def _tell(self, process: int) -> StepGraph | None:
        told = {node: name for node, name in self._told.items() if process in self._touched[node]}
        if not told:
            return None
        outputs = [(OutputSpec(name, OutputRole.BOUNDARY), node) for node, name in told.items()]
        return self._build("meeting", outputs, {})

    def _own(self, process: int) -> StepGraph | None:
        outputs = self._outputs(process)
        if not any(self._owners[spec.name] for spec, _ in outputs):
            return None
        own_state = {node for node in self._specs if not self._is_foreign(node, process)}
        given = {node: name for node, name in self._told.items() if node not in own_state}
        return self._build("update", outputs, given)

    def _build(
        self, name: str, outputs: Iterable[tuple[OutputSpec, fx.Node]], given: Mapping[fx.Node, str]
    ) -> StepGraph:
        outputs = list(outputs)
        needed = ancestors((node for _, node in outputs), stop=given)
        written = {spec.name for spec, _ in outputs if spec.role is OutputRole.NEW_VALUE}
        builder = GraphBuilder()
        for node, spec in self._specs.items():
            if node not in given and (node in needed or spec.name in written):
                builder.input(spec, node)
        for node, told in given.items():
            if node in needed:
                builder.input(InputSpec.of(told, Role.BOUNDARY, value_of(node)), node)
        builder.copy(node for node in self._update.ops.nodes if node in needed and node not in given)
        for spec, node in outputs:
            builder.output(spec, builder.copies[node])
        return builder.build(name, constants=self._update.constants, graphs=self._update.graphs)
