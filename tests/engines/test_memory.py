"""The policy for freed memory never stands in the way."""

from __future__ import annotations

import pytest

PROGRAM = """
import os, torch
from poptorch.engines import memory
os.environ["POPTORCH_KEEP_MEMORY"] = "{value}"
memory.keep_freed_memory()
for _ in range(3):
    kept = [torch.zeros(1 << 20) for _ in range(8)]
    del kept
memory.return_freed_memory()
"""


@pytest.mark.parametrize("value", ["0", "1"])
def test_memory_can_be_kept_and_returned(value, programs):
    programs.run(PROGRAM.format(value=value))
