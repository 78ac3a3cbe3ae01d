"""`StepGraph` → … → `Executable`: passes, accumulation, lowering."""

from poptorch.compiler.dump import dumping, is_dumping, show_captured
from poptorch.compiler.lower import Surroundings, compile_graph

__all__ = ["Surroundings", "compile_graph", "dumping", "is_dumping", "show_captured"]
