"""The environment variables that PopTorch reads, each declared once with its default and meaning."""

from __future__ import annotations

import os
from dataclasses import dataclass

from poptorch.errors import VariableError


@dataclass(frozen=True)
class Variable:
    """One environment variable: `read()` gives its current value, or the default."""

    name: str
    default: str
    meaning: str

    def read(self) -> str:
        return os.environ.get(self.name, self.default)

    def integer(self) -> int:
        """The value as a number."""
        try:
            return int(self.read())
        except ValueError:
            raise VariableError(
                f"environment variable {self.name} is {self.read()!r}, but must be an integer"
            ) from None

    def unusable(self, error: OSError) -> VariableError:
        """The error to raise if the file or folder that it names cannot be used."""
        return VariableError(f"environment variable {self.name} is {self.read()!r}, which cannot be used: {error}")

    def flag(self) -> bool:
        """The value as a switch: `0` is off, other integers are on."""
        return self.integer() != 0


ENGINE = Variable("POPTORCH_ENGINE", "", "engine to use: `inductor`, `eager` or `tiered`; Options.engine wins over it")
FALLBACK = Variable(
    "POPTORCH_FALLBACK", "1", "0 makes it an error if Inductor cannot compile a program, which else runs on `eager`"
)
COMPILE_THREADS = Variable(
    "POPTORCH_COMPILE_THREADS", "", "how many C++ compilers run at the same time; by default one for each processor"
)
COMPILE_MEMORY = Variable(
    "POPTORCH_COMPILE_MEMORY", "1024", "megabytes that must be free before a second C++ compiler is started"
)
MACHINE_DIR = Variable(
    "POPTORCH_MACHINE_DIR",
    "",
    "folder for headers that are compiled once per machine; by default in that of the platform for caches",
)
ALIKE_LAYERS = Variable(
    "POPTORCH_ALIKE_LAYERS",
    "6",
    "how many equal layers a model must have for native code to be compiled once for all; 0: never",
)
DUMP = Variable("POPTORCH_DUMP", "", "folder that receives the graph after each pass, one text file per pass")
EXPORT_PROTO_FILE = Variable(
    "POPTORCH_EXPORT_PROTO_FILE", "", "file that receives the captured graph as text; in a folder it is `model.proto`"
)
EXPORT_PROTO_AS_BINARY = Variable("POPTORCH_EXPORT_PROTO_AS_BINARY", "0", "1 compresses that file with zlib")
MAX_GRAPH_LEN = Variable("POPTORCH_MAX_GRAPH_LEN", "10", "lines of a captured graph in the log at DEBUG; 0 for all")
KEEP_MEMORY = Variable("POPTORCH_KEEP_MEMORY", "1", "0 returns freed memory to the system during training; slower")
DATA_TIMEOUT = Variable(
    "POPTORCH_DATA_TIMEOUT",
    "",
    "seconds that a loader waits for one batch; by default it gives up after 7 s in which its workers do nothing, "
    "and after an hour if they are busy; the argument `timeout` of a loader wins over it",
)
TIMEOUT = Variable(
    "POPTORCH_TIMEOUT", "60", "seconds that a process of a program waits for the others before it says who is missing"
)

LOG_LEVEL = Variable("POPTORCH_LOG_LEVEL", "WARN", "TRACE, DEBUG, INFO, WARN, ERR or OFF (also 0-4 and 6)")
LOG_ALL_PROCESSES = Variable(
    "POPTORCH_LOG_ALL_PROCESSES", "0", "1 shows what all processes of a program log; by default process 0, and errors"
)
LOG_DEST = Variable("POPTORCH_LOG_DEST", "stderr", "where log lines go: `stderr`, `stdout`, or the name of a file")

NUM_IPUS = Variable("POPTORCH_NUM_IPUS", "64", "how many IPUs are emulated; 0 for a machine without any")
IPU_MODEL = Variable("POPTORCH_IPU_MODEL", "0", "1 runs on the IPU model and reports no IPUs; Options.useIpuModel wins")
SMALL_IPU_MODEL = Variable("POPTORCH_SMALL_IPU_MODEL", "0", "1 is like POPTORCH_IPU_MODEL, with 4 tiles per IPU")
IPU_MODEL_VERSION = Variable("POPTORCH_IPU_MODEL_VERSION", "ipu2", "which IPU is emulated: `ipu1`, `ipu2` or `ipu21`")
WAIT_FOR_IPU = Variable("POPTORCH_WAIT_FOR_IPU", "0", "1 waits for an IPU if all are taken, instead of failing")

WAIT_LIMIT = Variable("POPTORCH_WAIT_LIMIT", "3600", "how many seconds POPTORCH_WAIT_FOR_IPU waits before it fails")
IPU_LOCKS = Variable(
    "POPTORCH_IPU_LOCKS", "", "folder in which processes agree on who has which IPU (default: temporary)"
)

LIGHTNING_AUTO = Variable(
    "POPTORCH_LIGHTNING_AUTO", "0", '1 lets `accelerator="auto"` of a Lightning Trainer mean IPUs, once it knows them'
)
LIGHTNING_AUTOLOAD = Variable(
    "POPTORCH_LIGHTNING_AUTOLOAD", "1", "0 leaves Lightning alone until a program imports `poptorch.lightning`"
)

CACHE = Variable("POPTORCH_CACHE", "1", "0 compiles every model anew, and keeps nothing for the next time")
CACHE_DIR = Variable(
    "POPTORCH_CACHE_DIR",
    "",
    "folder for compiled programs, as in Options.enableExecutableCaching; by default that of the platform",
)
CACHE_SIZE = Variable("POPTORCH_CACHE_SIZE", "2048", "megabytes that it may take; what was used least recently goes")
DEFAULT_OPTIONS = Variable("POPTORCH_DEFAULT_OPTIONS", "", "options of every new Options object, as JSON")
POPLAR_ENGINE_OPTIONS = Variable("POPLAR_ENGINE_OPTIONS", "", "engine options as JSON; wins over enableProfiling")
FAULT = Variable("POPTORCH_FAULT", "", "makes a call fail, to test recovery: `recoverable`, `unrecoverable@3`, …")

VARIABLES: tuple[Variable, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Variable))


def restarts() -> int:
    """How often torchrun has started this program again after a failure."""
    return Variable("TORCHELASTIC_RESTART_COUNT", "0", "set by torchrun").integer()
