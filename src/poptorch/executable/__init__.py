"""The finished program as a frozen, saveable value."""

from poptorch.executable.checks import IndexCheck
from poptorch.executable.executable import AnchorPlan, Batching, Executable, Grouping
from poptorch.executable.program import Program, in_place
from poptorch.ir import InputSpec, OutputRole, Phase, Role, note_of
from poptorch.ir.ops import is_view

__all__ = [
    "AnchorPlan",
    "Batching",
    "Executable",
    "Grouping",
    "IndexCheck",
    "InputSpec",
    "OutputRole",
    "Phase",
    "Program",
    "Role",
    "in_place",
    "is_view",
    "note_of",
]
