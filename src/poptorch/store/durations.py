"""How long earlier compilations on this machine took: a small file beside the compiled programs, for estimates.

Nothing depends on it: a file that is missing, damaged or overwritten by another process means a worse estimate.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from poptorch.store.atomic import write_atomically

FILE = "durations.json"
_KEPT = 200
_MOST_NBYTES = 2**20
_NEIGHBOURS = 5
_FARTHEST = 8.0  # a program of so many times the size tells nothing


@dataclass(frozen=True)
class Duration:
    """One compilation: the ops of its programs, and how long it took."""

    ops: int
    seconds: float


class Durations:
    """What is known of a folder of compiled programs."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def read(self) -> list[Duration]:
        """All that is known, the oldest first."""
        try:
            if self._path.stat().st_size > _MOST_NBYTES:
                return []
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return []
        rows = cast("list[Any]", found) if isinstance(found, list) else []
        return [Duration(*row) for row in rows if _is_duration(row)]

    def add(self, duration: Duration) -> None:
        """Remember one more; if that does not work, it does not matter."""
        kept = [*self.read(), duration][-_KEPT:]
        content = json.dumps([[each.ops, round(each.seconds, 2)] for each in kept]).encode()
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, content)

    def estimate(self, ops: int) -> float | None:
        """Seconds for programs of so many ops: what the latest of about that size took, in proportion."""
        if ops < 1:
            return None
        near = [(abs(math.log(each.ops / ops)), age, each) for age, each in enumerate(reversed(self.read()))]
        chosen = [each for distance, _, each in sorted(near, key=lambda item: item[:2]) if distance < _LOG_FARTHEST]
        expected = [each.seconds * ops / each.ops for each in chosen[:_NEIGHBOURS]]
        return statistics.median(expected) if expected else None


_LOG_FARTHEST = math.log(_FARTHEST)


def _is_duration(row: object) -> bool:
    if not isinstance(row, list) or len(cast("list[Any]", row)) != 2:
        return False
    ops, seconds = cast("list[Any]", row)
    return type(ops) is int and ops > 0 and type(seconds) in (int, float) and 0 <= seconds < math.inf
