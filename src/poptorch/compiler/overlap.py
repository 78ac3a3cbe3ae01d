"""Check that inputs and outputs which are marked for overlapped transfer can be transferred so."""

from __future__ import annotations

import json
from collections import Counter
from typing import cast

import torch
from torch import fx

from poptorch.compiler.passes.hints import HINT, OVERLAP_INPUT, OVERLAP_OUTPUT
from poptorch.enums import OutputMode, OverlapMode
from poptorch.errors import CompileError, explain
from poptorch.executable import Interface
from poptorch.ir import Direction, OutputRole, Role, SourceLine, StepGraph, note_of
from poptorch.options import Mode, Settings
from poptorch.structure import Leaf, Structure, map_leaves

aten = torch.ops.aten
_NEEDED_TILES = 32
_FUNCTIONS = {OVERLAP_INPUT: "poptorch.set_overlap_for_input", OVERLAP_OUTPUT: "poptorch.set_overlap_for_output"}
_IDENTITIES = frozenset({aten.detach.default, aten.alias.default, HINT})
_OF_OURS = frozenset({aten.clone.default, aten._to_copy.default})  # what capture puts around inputs and outputs


def check_overlap(graph: StepGraph, interface: Interface, settings: Settings) -> None:
    """Raise an error if a tensor cannot be marked as it is."""
    marks = [node for node in graph.ops.nodes if node.target is HINT and node.args[1] in _FUNCTIONS and _is_said(node)]
    for mark in marks:
        if mark.args[1] == OVERLAP_INPUT:
            _check_input(graph, mark)
        else:
            _check_output(graph, interface, mark)
        if json.loads(str(mark.args[2])) != OverlapMode.NoOverlap.value:
            _check_settings(mark, settings)


def _is_said(mark: fx.Node) -> bool:
    """Whether the user said it: hints on gradients follow from those on values."""
    note = note_of(mark)
    return note is None or note.direction is Direction.FORWARD


def _check_input(graph: StepGraph, mark: fx.Node) -> None:
    inputs = {node for spec, node in graph.inputs if spec.role is Role.USER_INPUT}
    below = _chain(mark.all_input_nodes[0])
    if below[-1] not in inputs:
        raise _error(mark, "was applied on a node which is not a tensor input", "mark an argument of forward itself")
    for node, way in zip(below, [mark, *below], strict=False):
        if set(node.users) != {way}:
            raise _error(
                mark,
                "must be the only op applied to an input",
                "use what it returns everywhere, and the input itself nowhere",
            )


def _check_output(graph: StepGraph, interface: Interface, mark: fx.Node) -> None:
    outputs = [node for spec, node in graph.outputs if spec.role is OutputRole.USER_OUTPUT]
    chains = [_chain(node) for node in outputs]
    returned = [index for index, chain in enumerate(chains) if mark in chain]
    if not returned:
        raise _error(
            mark, "was applied on a node which is not a tensor output", "return what it returns, or do not mark it"
        )
    value = _chain(mark)[-1]
    times = Counter(_leaves(interface.result))
    same = sum(times[index] for index, chain in enumerate(chains) if chain[-1] is value)
    if same > 1:
        raise _error(mark, "was applied on a tensor that is returned twice", "return only what it returns, once")


def _chain(node: fx.Node) -> list[fx.Node]:
    """A value and what it is passed on from, back to the op that computed it."""
    found = [node]
    while node.target in _IDENTITIES or (node.target in _OF_OURS and _line(node) is None):
        node = node.all_input_nodes[0]
        found.append(node)
    return found


def _leaves(structure: Structure) -> list[int]:
    """The index of every tensor of a result; one that is returned twice appears twice."""
    found: list[int] = []

    def see(index: int) -> Structure:
        found.append(index)
        return Leaf(index)

    map_leaves(structure, see)
    return found


def _check_settings(mark: fx.Node, settings: Settings) -> None:
    if settings.placement.strategy.mode is Mode.PIPELINED:
        raise CompileError(
            explain(
                "Overlapped IO is not supported with poptorch.PipelinedExecution.",
                where=str(_line(mark)),
                fix="choose poptorch.ShardedExecution with Options.setExecutionStrategy, or OverlapMode.NoOverlap",
            )
        )
    if settings.placement.io_tiles < _NEEDED_TILES:
        raise CompileError(
            explain(
                f"No IO tiles allocated: overlapped transfers need at least {_NEEDED_TILES} of them.",
                where=str(_line(mark)),
                fix=f"call Options.TensorLocations.numIOTiles({_NEEDED_TILES})",
            )
        )
    if mark.args[1] == OVERLAP_OUTPUT and settings.batching.output_mode not in (OutputMode.All, OutputMode.Sum):
        raise CompileError(
            explain(
                "Unsupported output mode for overlapped IO.",
                where=str(_line(mark)),
                mode=f"OutputMode.{settings.batching.output_mode.name}",
                fix="call Options.outputMode with OutputMode.All or OutputMode.Sum",
            )
        )


def _error(mark: fx.Node, problem: str, fix: str) -> CompileError:
    return CompileError(explain(f"{_FUNCTIONS[cast('str', mark.args[1])]} {problem}.", where=str(_line(mark)), fix=fix))


def _line(node: fx.Node) -> SourceLine | None:
    note = note_of(node)
    return None if note is None else note.line
