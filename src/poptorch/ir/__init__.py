"""`StepGraph`: an FX graph of ATen ops and its `Signature`; printing, verifying, and nested user values."""

from poptorch.ir.graph import Guard, Note, Phase, StepGraph, annotation, give_name, note_of, value_of, verify
from poptorch.ir.signature import InputSpec, OutputRole, OutputSpec, Role, Signature, tensor_type
from poptorch.ir.source import SourceLine

__all__ = [
    "Guard",
    "InputSpec",
    "Note",
    "OutputRole",
    "OutputSpec",
    "Phase",
    "Role",
    "Signature",
    "SourceLine",
    "StepGraph",
    "annotation",
    "give_name",
    "note_of",
    "tensor_type",
    "value_of",
    "verify",
]
