"""What the system tells about running processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class ProcessStat:
    """One process."""

    pid: int
    parent: int
    group: int
    state: str  # the system's letter for it
    seconds: float  # of processor time, its own and of its children that have ended

    @property
    def waits_for_disk(self) -> bool:
        return self.state == "D"

    @property
    def has_ended(self) -> bool:
        """Whether only its exit code is still there, for its parent to read."""
        return self.state in "ZX"


def process_table() -> list[ProcessStat]:
    """All processes; empty where the system does not tell (it needs Linux's /proc)."""
    found: list[ProcessStat] = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold blanks
        seconds = sum(map(int, fields[11:15])) / _TICKS_PER_SECOND
        found.append(ProcessStat(int(entry.parent.name), int(fields[1]), int(fields[2]), fields[0], seconds))
    return found
