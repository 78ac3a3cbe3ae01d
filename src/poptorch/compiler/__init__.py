"""`StepGraph` → … → `Executable`: passes, accumulation, lowering."""

from poptorch.compiler.dump import dumping, show_captured
from poptorch.compiler.lower import Surroundings, compile_graph

__all__ = ["Surroundings", "compile_graph", "dumping", "show_captured"]
