"""`trainingModel`, `inferenceModel`, `PoplarExecutor`: joins everything else."""

from poptorch.model.executor import PoplarExecutor
from poptorch.model.geometric import registerGeometricCustomArgParsers
from poptorch.model.hooks import registerPostCompileHook, registerPreCompileHook
from poptorch.model.printing import module_repr, print
from poptorch.model.wrapping import importPoptorchMetadataFromFile, inferenceModel, load, trainingModel

__all__ = [
    "PoplarExecutor",
    "importPoptorchMetadataFromFile",
    "inferenceModel",
    "load",
    "module_repr",
    "print",
    "registerGeometricCustomArgParsers",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "trainingModel",
]
