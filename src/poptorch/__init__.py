"""PopTorch: train and run PyTorch models as ahead-of-time compiled programs on emulated IPUs."""

from poptorch import _logging
from poptorch._logging import logger, setLogLevel
from poptorch._version import __version__
from poptorch.annotations import identity_loss, isRunningOnIpu
from poptorch.enums import OutputMode, ReductionType
from poptorch.errors import Error, RecoverableError, UnrecoverableError
from poptorch.ir.structure import ICustomArgParser, registerCustomArgParser
from poptorch.model import PoplarExecutor, inferenceModel, trainingModel
from poptorch.options import Options

_logging.configure()

__all__ = [
    "__version__",
    "Error",
    "ICustomArgParser",
    "Options",
    "OutputMode",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "UnrecoverableError",
    "identity_loss",
    "inferenceModel",
    "isRunningOnIpu",
    "logger",
    "registerCustomArgParser",
    "setLogLevel",
    "trainingModel",
]
