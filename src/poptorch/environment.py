"""The environment variables that PopTorch reads, each declared once with its default and meaning."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable: `read()` gives its current value, or the default."""

    name: str
    default: str
    meaning: str

    def read(self) -> str:
        return os.environ.get(self.name, self.default)


ENGINE = Variable("POPTORCH_ENGINE", "", "engine to use, `inductor` or `eager`; Options.engine wins over it")
DUMP = Variable("POPTORCH_DUMP", "", "folder that receives the graph after each pass, one text file per pass")
LOG_LEVEL = Variable("POPTORCH_LOG_LEVEL", "WARN", "TRACE, DEBUG, INFO, WARN, ERR or OFF (also 0-4 and 6)")

KEEP_MEMORY = Variable("POPTORCH_KEEP_MEMORY", "1", "0 returns freed memory to the system during training; slower")

VARIABLES: tuple[Variable, ...] = (ENGINE, DUMP, LOG_LEVEL, KEEP_MEMORY)
