"""Where ops run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """A block of the model, the stage and phase that it belongs to, and an IPU, counted within a replica.

    A section is a stretch of `forward` on one IPU: each change to another IPU begins the next.
    """

    block: str = ""  # empty for what comes before the first block
    stage: int = 0
    phase: int = 0
    ipu: int = 0
    section: int = 0

    def __str__(self) -> str:
        phase = f" phase {self.phase}" if self.phase else ""
        return f"ipu {self.ipu} stage {self.stage}{phase}"
