"""Vector instructions: the processor is believed, until a program cannot be built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import torch, poptorch
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    x = torch.ones(2, 3)
    options = poptorch.Options().engine("inductor")
    torch.testing.assert_close(poptorch.inferenceModel(model, options)(x), model(x).detach())
    print("right")
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.only_long
@pytest.mark.timeout(400)  # it compiles twice, and lets Inductor search in between
def test_a_compiler_that_does_not_know_the_instructions_of_the_processor_gets_none(tmp_path):
    compiler = tmp_path / "g++"
    refuse = 'case "$*" in *-DCPU_CAP*|*CPU_CAPABILITY*) echo "error: unknown instructions"; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n{refuse}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    folders = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "POPTORCH_CACHE_DIR")}
    environment = {**os.environ, **folders, "CXX": str(compiler), "POPTORCH_MACHINE_DIR": str(tmp_path / "machine")}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "right\n", done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    kernels = [call for call in calls if "poptorch-build" in call and " -O3 " in call and "-shared" not in call]
    assert "CPU_CAPABILITY" in kernels[0], "the processor was not believed"
    assert "CPU_CAPABILITY" not in kernels[-1]
    assert any("CPU_CAPABILITY" in call and "poptorch-build" not in call for call in calls), "nobody has looked"
