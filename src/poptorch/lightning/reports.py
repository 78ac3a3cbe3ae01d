"""Reports of a run: asking the executors for theirs, and the times of those that wrote none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import poptorch
from poptorch import environment
from poptorch.errors import VariableError

_FILE = "profile.pop"
_TITLE = "times of the last call on an emulated IPU"
_START = f'{{\n "report": "{_TITLE}'.encode()  # of a file that is ours


def request(folder: str | None) -> None:
    """Ask for reports by the variable that executors read; what it says already stays."""
    variable = environment.POPLAR_ENGINE_OPTIONS
    text = variable.read()
    try:
        wanted: dict[str, Any] = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise VariableError(f"environment variable {variable.name} is {text!r}, but must be JSON: {error}") from None
    wanted.setdefault("autoReport.all", True)
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        wanted.setdefault("autoReport.directory", str(folder))
    os.environ[variable.name] = json.dumps(wanted)


def write(folder: str | None, models: dict[Any, poptorch.PoplarExecutor]) -> None:
    """Write the times of the last call of each model, unless its executor has written a report of its own."""
    for stage, executor in models.items():
        name = "training" if stage.value == "train" else "inference"
        file = Path(folder or ".") / name / _FILE
        if executor.isCompiled() and (not file.exists() or file.read_bytes().startswith(_START)):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(_times(executor), indent=1))


def _times(executor: poptorch.PoplarExecutor) -> dict[str, Any]:
    """Seconds as minimum, maximum and average, for the micro-batches of the last call."""
    names = ("minimum", "maximum", "average")
    latencies = {
        "latency": executor.getLatency(),
        "host to IPU": executor.getHostIpuLatency(),
        "compute": executor.getComputeLatency(),
        "IPU to host": executor.getIpuHostLatency(),
    }
    seconds = {name: dict(zip(names, values, strict=True)) for name, values in latencies.items()}
    return {"report": _TITLE, "seconds": seconds}
