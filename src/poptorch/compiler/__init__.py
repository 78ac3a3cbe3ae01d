"""`StepGraph` → … → `Executable`: passes, accumulation, lowering."""

from poptorch.compiler.dump import dumping, show_captured
from poptorch.compiler.lower import compile_graph

__all__ = ["compile_graph", "dumping", "show_captured"]
