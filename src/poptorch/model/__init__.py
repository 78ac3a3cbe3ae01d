"""`trainingModel`, `inferenceModel`, `PoplarExecutor`: joins everything else."""

from poptorch.model.executor import PoplarExecutor
from poptorch.model.geometric import registerGeometricCustomArgParsers
from poptorch.model.hooks import registerPostCompileHook, registerPreCompileHook
from poptorch.model.printing import module_repr, print
from poptorch.model.wrapping import inferenceModel, trainingModel

__all__ = [
    "PoplarExecutor",
    "inferenceModel",
    "module_repr",
    "print",
    "registerGeometricCustomArgParsers",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "trainingModel",
]
