"""Cut the update of all weights into one for each section, where the weights are."""

from __future__ import annotations

from torch import fx

from poptorch.executable import Kind, part_name
from poptorch.ir import GraphBuilder, InputSpec, OutputSpec, StepGraph
from poptorch.ir.ops import ancestors


def split_update(update: StepGraph, homes: dict[str, int]) -> list[StepGraph]:
    """An update for each section that has weights, by `homes`, the section of each parameter.

    An update in which parameters of several sections meet, for example in the norm of all gradients, stays whole.
    What belongs to no parameter, such as counters of steps, is written by the last one.
    """
    specs = {node: spec for spec, node in update.inputs}
    owners = {spec.name: spec.owner for spec in update.signature.inputs}
    present = sorted({homes[owners[spec.name]] for spec in update.signature.outputs if owners[spec.name] in homes})
    if len(present) < 2:
        return [update]
    outputs: dict[int, list[tuple[OutputSpec, fx.Node]]] = {section: [] for section in present}
    for spec, node in update.outputs:
        outputs[homes.get(owners[spec.name], present[-1])].append((spec, node))
    if any(_reaches_beyond(section, own, specs, homes) for section, own in outputs.items()):
        return [update]
    return [_build(update, section, own, specs) for section, own in outputs.items()]


def _reaches_beyond(
    section: int,
    outputs: list[tuple[OutputSpec, fx.Node]],
    specs: dict[fx.Node, InputSpec],
    homes: dict[str, int],
) -> bool:
    """Whether an update reads what belongs to a parameter of another section."""
    read = ancestors(node for _, node in outputs)
    return any(homes.get(specs[node].owner, section) != section for node in read if node in specs)


def _build(
    update: StepGraph,
    section: int,
    outputs: list[tuple[OutputSpec, fx.Node]],
    specs: dict[fx.Node, InputSpec],
) -> StepGraph:
    needed = ancestors(node for _, node in outputs)
    written = {spec.name for spec, _ in outputs}
    builder = GraphBuilder()
    builder.inputs((spec, node) for node, spec in specs.items() if node in needed or spec.name in written)
    builder.copy(node for node in update.ops.nodes if node in needed)
    for spec, node in outputs:
        builder.output(spec, builder.copies[node])
    name = part_name((Kind.UPDATE, section))
    return builder.build(name, constants=update.constants, graphs=update.graphs)
