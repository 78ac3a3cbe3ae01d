"""Give every op a place.

In:    a StepGraph in which the ops of a model with blocks know theirs, as far as they come from the user's lines.
Out:   the same graph in which all ops do. What autograd adds between two ops of the model belongs to the earlier
       section, the update of a parameter to where forward uses that parameter, and what several parameters share, such
       as the norm of all gradients, to the first section.
Keeps: every value, the signature. A graph without blocks is left alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx

from poptorch.ir import Direction, InputSpec, Note, Placement, Role, StepGraph, annotation, note_of
from poptorch.options import Settings


def place_ops(graph: StepGraph, settings: Settings) -> StepGraph:
    """Fill in the placement of every op that has none."""
    if not has_blocks(graph):
        return graph
    ops = graph.copy_ops()
    placed = replace(graph, ops=ops)
    homes = parameter_placements(placed)
    owners = {node: spec for spec, node in placed.inputs}
    anywhere = without_place(placed)
    for node in ops.nodes:
        note = note_of(node)
        if node.op == "call_function" and note is not None and note.placement is None:
            found = _placement(node, note, owners, homes, anywhere)
            node.meta = {**node.meta, "custom": {**node.meta["custom"], **annotation(replace(note, placement=found))}}
    return placed


def has_blocks(graph: StepGraph) -> bool:
    """Whether the model is annotated."""
    notes = (note_of(node) for node in graph.ops.nodes)
    return any(note is not None and note.placement is not None and note.placement.block for note in notes)


def parameter_placements(graph: StepGraph) -> dict[str, Placement]:
    """Where forward uses each parameter and buffer first."""
    found: dict[str, Placement] = {}
    for spec, node in graph.inputs:
        if spec.role in (Role.PARAMETER, Role.BUFFER):
            places = [p for user in node.users if (p := _forward_placement(user)) is not None]
            if places:
                found[spec.name] = min(places, key=lambda place: place.section)
    return found


def _forward_placement(node: fx.Node) -> Placement | None:
    note = note_of(node)
    return note.placement if note is not None and note.direction is Direction.FORWARD else None


def without_place(graph: StepGraph) -> set[fx.Node]:
    """Counters of micro-batches, factors of the loss and the like, and what is computed from them alone.

    All sections need it, so it comes before them.
    """
    found = {node for spec, node in graph.inputs if spec.role in _ROLES and not spec.owner}
    for node in graph.ops.nodes if found else ():
        if _is_placed_by_use(node) and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


_ROLES = (Role.ACCUMULATOR, Role.HYPER, Role.OPTIMIZER_STATE)


def _is_placed_by_use(node: fx.Node) -> bool:
    note = note_of(node)
    return node.op == "call_function" and note is not None and note.direction is not Direction.UPDATE


def _placement(
    node: fx.Node,
    note: Note,
    owners: dict[fx.Node, InputSpec],
    homes: dict[str, Placement],
    anywhere: Collection[fx.Node],
) -> Placement:
    """Where an op without a place belongs, by its operands, which have theirs unless they can be anywhere."""
    operands = [used for used in node.all_input_nodes if used not in anywhere]
    known = [p for used in operands if (p := _operand_placement(used, owners, homes)) is not None]
    if note.direction is Direction.FORWARD:
        return max(known, key=lambda place: place.section, default=Placement())
    return min(known, key=lambda place: place.section, default=Placement())


def _operand_placement(
    node: fx.Node, owners: dict[fx.Node, InputSpec], homes: dict[str, Placement]
) -> Placement | None:
    if node in owners:
        return homes.get(owners[node].owner)
    note = note_of(node)
    return None if note is None else note.placement
