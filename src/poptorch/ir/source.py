"""A place in the user's own code, as graphs and error messages show it."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SourceLine:
    """One line of the user's program, with what was written there when it was read."""

    file: str
    line: int
    function: str
    text: str = ""

    @classmethod
    def read(cls, file: str, line: int, function: str) -> SourceLine:
        """The line as it is in the file now."""
        return cls(file, line, function, linecache.getline(file, line).strip())

    @property
    def short(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    def __str__(self) -> str:
        where = f"{self.short}, in {self.function}"
        return f"{where}: {self.text}" if self.text else where
