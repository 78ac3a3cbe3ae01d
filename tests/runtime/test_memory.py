"""The policy for freed memory never stands in the way."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from poptorch.runtime import memory
memory.keep_freed_memory()
for _ in range(3):
    kept = [torch.zeros(1 << 20) for _ in range(8)]
    del kept
memory.return_freed_memory()
"""


@pytest.mark.parametrize("value", ["0", "1"])
def test_memory_can_be_kept_and_returned(value, monkeypatch):
    monkeypatch.setenv("POPTORCH_KEEP_MEMORY", value)
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False, timeout=100).returncode == 0
