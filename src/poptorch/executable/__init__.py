"""The finished program as a frozen, saveable value."""

from poptorch.executable.executable import Batching, Executable
from poptorch.executable.program import Program, in_place

__all__ = ["Batching", "Executable", "Program", "in_place"]
