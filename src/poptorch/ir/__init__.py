"""`StepGraph`: an FX graph of ATen ops and its `Signature`; building, editing, printing and verifying."""

from poptorch.ir.build import GraphBuilder
from poptorch.ir.control import call_graph, choose_graph, is_control, repeat_graph, repeat_while, runs_of
from poptorch.ir.edit import insert, insert_as, without_identities
from poptorch.ir.graph import (
    SCOPE,
    Direction,
    Guard,
    Hint,
    HintValue,
    Note,
    StepGraph,
    annotation,
    give_name,
    give_note,
    hint_of,
    is_update,
    note_of,
    verify,
)
from poptorch.ir.placement import Placement
from poptorch.ir.signature import InputSpec, OutputRole, OutputSpec, Role, Signature, tensor_type
from poptorch.ir.source import SourceLine
from poptorch.ir.values import describe, fake_mode, update_value, value_of, with_stride

__all__ = [
    "SCOPE",
    "GraphBuilder",
    "Guard",
    "Hint",
    "HintValue",
    "InputSpec",
    "Note",
    "OutputRole",
    "OutputSpec",
    "Direction",
    "Placement",
    "Role",
    "Signature",
    "SourceLine",
    "StepGraph",
    "annotation",
    "call_graph",
    "choose_graph",
    "describe",
    "fake_mode",
    "give_name",
    "give_note",
    "hint_of",
    "insert",
    "insert_as",
    "is_control",
    "is_update",
    "note_of",
    "repeat_graph",
    "repeat_while",
    "runs_of",
    "tensor_type",
    "update_value",
    "value_of",
    "verify",
    "with_stride",
    "without_identities",
]
